/* What Python sees of bridge_chat.h. */

typedef struct lsrv_chat_templates lsrv_chat_templates;
typedef struct lsrv_chat_session   lsrv_chat_session;

typedef struct lsrv_chat_span {
    int32_t role;
    int32_t pos;
    int32_t len;
} lsrv_chat_span;

int32_t lsrv_chat_templates_new(const struct llama_model * model, const char * source, const char * bos, const char * eos,
                                lsrv_chat_templates ** out, char ** err);
void lsrv_chat_templates_free(lsrv_chat_templates * templates);
int32_t lsrv_chat_templates_describe(const lsrv_chat_templates * templates, bool use_jinja, const char * kwargs,
                                     char ** out, char ** err);

int32_t lsrv_chat_session_new(const lsrv_chat_templates * templates, const struct llama_vocab * vocab, const char * request,
                              lsrv_chat_session ** out, char ** err);
int32_t lsrv_chat_session_clone(const lsrv_chat_session * session, lsrv_chat_session ** out, char ** err);
void lsrv_chat_session_free(lsrv_chat_session * session);
int32_t lsrv_chat_session_describe(const lsrv_chat_session * session, char ** out, char ** err);
int32_t lsrv_chat_session_spans(const lsrv_chat_session * session, const int32_t * tokens, int32_t n_tokens,
                                lsrv_chat_span ** spans, int32_t * n_spans, char ** err);
int32_t lsrv_chat_session_feed(lsrv_chat_session * session, const char * text, int32_t n_text, bool is_final,
                               char ** diffs, char ** err);
int32_t lsrv_chat_session_message(const lsrv_chat_session * session, char ** out, char ** err);
