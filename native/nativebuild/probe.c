/* Runs one CPU feature's instruction, so that a feature that cpuid reports and the machine traps on is found out.
 *
 * `probe` lists the features that it was compiled for; `probe NAME` runs NAME's instruction: exit code 0, or death by a
 * signal. AMX first asks the kernel for permission, as ggml does; a refusal is exit code 3.
 *
 * Everything around the instructions is static data and plain calls, to be compiled without optimization: the compiler,
 * told -march=native, must find nothing here to vectorize with the very instructions under test.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#ifdef __AMX_TILE__
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static int tiles_permitted(void) {
#ifdef __linux__
    const long arch_req_xcomp_perm = 0x1023;
    const long xfeature_xtiledata  = 18;
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
    return 0;
#endif
}

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static struct tile_config config;
static int8_t tile_memory[16 * 64] __attribute__((aligned(64)));

#define WITH_TILES(instruction)                                                                        \
    do {                                                                                               \
        if (!tiles_permitted()) return 3;                                                              \
        config.palette = 1;                                                                            \
        for (int i = 0; i < 3; i++) { config.colsb[i] = 64; config.rows[i] = 16; }                     \
        __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");                                   \
        __asm__ volatile("tilezero %%tmm0\n\t"                                                         \
                         "tileloadd (%0,%1,1), %%tmm1\n\t"                                             \
                         "tileloadd (%0,%1,1), %%tmm2\n\t" instruction                                 \
                         "tilestored %%tmm0, (%0,%1,1)\n\t"                                            \
                         "tilerelease" : : "r"(tile_memory), "r"((long) 64) : "memory");               \
    } while (0)
#endif

static const struct rlimit no_core;
static uint64_t scratch[8] __attribute__((aligned(64)));

#define FEATURE(name, statement)                                         \
    if (wanted == NULL) puts(name);                                      \
    else if (strcmp(wanted, name) == 0) { statement; return 0; }

#define RUN(instruction) __asm__ volatile(instruction : : "r"(scratch), "m"(scratch) : "rax", "cc", "memory", "xmm0")

int main(int argc, char ** argv) {
    const char * wanted = argc > 1 ? argv[1] : NULL;
    setrlimit(RLIMIT_CORE, &no_core);

#ifdef __SSE3__
    FEATURE("sse3", RUN("haddps %%xmm0, %%xmm0"))
#endif
#ifdef __SSSE3__
    FEATURE("ssse3", RUN("pabsb %%xmm0, %%xmm0"))
#endif
#ifdef __SSE4_1__
    FEATURE("sse4.1", RUN("pmulld %%xmm0, %%xmm0"))
#endif
#ifdef __SSE4_2__
    FEATURE("sse4.2", RUN("pcmpgtq %%xmm0, %%xmm0"))
#endif
#ifdef __SSE4A__
    FEATURE("sse4a", RUN("extrq $1, $1, %%xmm0"))
#endif
#ifdef __POPCNT__
    FEATURE("popcnt", RUN("popcntl %%eax, %%eax"))
#endif
#ifdef __MOVBE__
    FEATURE("movbe", RUN("movbe (%0), %%eax"))
#endif
#ifdef __BMI__
    FEATURE("bmi", RUN("andn %%eax, %%eax, %%eax"))
#endif
#ifdef __BMI2__
    FEATURE("bmi2", RUN("shlx %%eax, %%eax, %%eax"))
#endif
#ifdef __ADX__
    FEATURE("adx", RUN("adcx %%eax, %%eax"))
#endif
#ifdef __AES__
    FEATURE("aes", RUN("aesenc %%xmm0, %%xmm0"))
#endif
#ifdef __PCLMUL__
    FEATURE("pclmul", RUN("pclmulqdq $0, %%xmm0, %%xmm0"))
#endif
#ifdef __SHA__
    FEATURE("sha", RUN("sha1msg1 %%xmm0, %%xmm0"))
#endif
#ifdef __GFNI__
    FEATURE("gfni", RUN("gf2p8mulb %%xmm0, %%xmm0"))
#endif
#ifdef __AVX__
    FEATURE("avx", RUN("vaddps %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __F16C__
    FEATURE("f16c", RUN("vcvtph2ps %%xmm0, %%ymm0"))
#endif
#ifdef __FMA__
    FEATURE("fma", RUN("vfmadd213ps %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __FMA4__
    FEATURE("fma4", RUN("vfmaddps %%ymm0, %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __XOP__
    FEATURE("xop", RUN("vphaddbd %%xmm0, %%xmm0"))
#endif
#ifdef __AVX2__
    FEATURE("avx2", RUN("vpaddd %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __VAES__
    FEATURE("vaes", RUN("vaesenc %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __VPCLMULQDQ__
    FEATURE("vpclmulqdq", RUN("vpclmulqdq $0, %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __AVXVNNI__
    FEATURE("avxvnni", RUN("%{vex%} vpdpbusd %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __AVXVNNIINT8__
    FEATURE("avxvnniint8", RUN("vpdpbssd %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __AVXVNNIINT16__
    FEATURE("avxvnniint16", RUN("vpdpwsud %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __AVXIFMA__
    FEATURE("avxifma", RUN("%{vex%} vpmadd52luq %%ymm0, %%ymm0, %%ymm0"))
#endif
#ifdef __AVXNECONVERT__
    FEATURE("avxneconvert", RUN("vcvtneebf162ps (%0), %%ymm0"))
#endif
#ifdef __AVX512F__
    FEATURE("avx512f", RUN("vaddps %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512CD__
    FEATURE("avx512cd", RUN("vpconflictd %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512VL__
    FEATURE("avx512vl", RUN("vpabsq %%ymm0, %%ymm0"))
#endif
#ifdef __AVX512BW__
    FEATURE("avx512bw", RUN("vpaddb %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512DQ__
    FEATURE("avx512dq", RUN("vpmullq %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512IFMA__
    FEATURE("avx512ifma", RUN("vpmadd52luq %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512VBMI__
    FEATURE("avx512vbmi", RUN("vpermb %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512VBMI2__
    FEATURE("avx512vbmi2", RUN("vpshldd $1, %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512VNNI__
    FEATURE("avx512vnni", RUN("vpdpbusd %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512BITALG__
    FEATURE("avx512bitalg", RUN("vpopcntb %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512VPOPCNTDQ__
    FEATURE("avx512vpopcntdq", RUN("vpopcntd %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512BF16__
    FEATURE("avx512bf16", RUN("vdpbf16ps %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AVX512FP16__
    FEATURE("avx512fp16", RUN("vaddph %%zmm0, %%zmm0, %%zmm0"))
#endif
#ifdef __AMX_TILE__
    FEATURE("amx-tile", WITH_TILES(""))
#ifdef __AMX_INT8__
    FEATURE("amx-int8", WITH_TILES("tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"))
#endif
#ifdef __AMX_BF16__
    FEATURE("amx-bf16", WITH_TILES("tdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t"))
#endif
#ifdef __AMX_FP16__
    FEATURE("amx-fp16", WITH_TILES("tdpfp16ps %%tmm2, %%tmm1, %%tmm0\n\t"))
#endif
#ifdef __AMX_COMPLEX__
    FEATURE("amx-complex", WITH_TILES("tcmmimfp16ps %%tmm2, %%tmm1, %%tmm0\n\t"))
#endif
#endif
    return wanted == NULL ? 0 : 2;
}
