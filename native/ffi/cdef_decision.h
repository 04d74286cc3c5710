/* What Python sees of bridge_decision.h. */


#define LSRV_ORDER_NONE ...
#define LSRV_ORDER_QUESTION_NOUL ...
#define LSRV_ORDER_QUESTION_CHOICE ...
#define LSRV_ORDER_QUESTION_SCORE ...
#define LSRV_ORDER_OPTION ...

typedef struct lsrv_template lsrv_template;

int32_t lsrv_decode_ordered(lsrv_engine * engine, int32_t n, const int32_t * token, const int32_t * pos,
                            const int32_t * seq_id, const int8_t * output, const int32_t * order, bool sync, uint64_t serial);
int32_t lsrv_logits_at(lsrv_engine * engine, int32_t idx, const int32_t * tokens, int32_t n, float * out, char ** err);
int32_t lsrv_embeddings_at(lsrv_engine * engine, const int32_t * idx, int32_t n, float * out, char ** err);

int32_t lsrv_template_new(const char * source, lsrv_template ** out, char ** err);
void lsrv_template_free(lsrv_template * tmpl);
int32_t lsrv_template_render(const lsrv_template * tmpl, const char * values, char ** out, char ** err);
