// The machine's own rate of f32 matrix multiplication, on one thread: what ./run bench divides by.
//
// c = a b with 1024 rows and columns each, by every library that is linked, best of several
// repeats. Prints one line, in GFLOP/s, where the last number is the better one:
//
//     OpenBLAS 101.2 oneDNN 104.9 best 104.9
//
// Run: build/PRESET/tools/bench_gemm [REPEATS]
#include <cblas.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifdef SHARD_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

enum { N = 1024 };

typedef void gemm(const float *a, const float *b, float *c); // all (N, N)

static void gemm_openblas(const float *a, const float *b, float *c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1, a, N, b, N, 0, c, N);
}

#ifdef SHARD_HAVE_ONEDNN
static void gemm_onednn(const float *a, const float *b, float *c) {
    if (dnnl_sgemm('N', 'N', N, N, N, 1, a, N, b, N, 0, c, N) != dnnl_success) {
        fputs("bench_gemm: dnnl_sgemm failed\n", stderr);
        exit(1);
    }
}
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// GFLOP/s of the fastest of the repeats. The call before them is not timed: libraries get ready in
// it.
static double rate(gemm *multiply, int repeats, const float *a, const float *b, float *c) {
    double best = 0;
    multiply(a, b, c);
    for (int i = 0; i < repeats; i++) {
        double start = now();
        multiply(a, b, c);
        double gflops = 2.0 * N * N * N / (now() - start) * 1e-9;
        best = gflops > best ? gflops : best;
    }
    return best;
}

static float *matrix(void) {
    float *m = aligned_alloc(64, (size_t)N * N * sizeof *m);
    if (m == NULL) {
        fputs("bench_gemm: no memory\n", stderr);
        exit(1);
    }
    for (size_t i = 0; i < (size_t)N * N; i++) {
        m[i] = (float)(i % 251) / 251 - 0.5f;
    }
    return m;
}

int main(int argc, char **argv) {
    int repeats = argc > 1 ? atoi(argv[1]) : 20;
    if (repeats < 1) {
        fputs("usage: bench_gemm [REPEATS]\n", stderr);
        return 2;
    }
    omp_set_num_threads(1);
    openblas_set_num_threads(1);
    float *a = matrix();
    float *b = matrix();
    float *c = matrix();
    double openblas = rate(gemm_openblas, repeats, a, b, c);
    double best = openblas;
    printf("OpenBLAS %.1f", openblas);
#ifdef SHARD_HAVE_ONEDNN
    double onednn = rate(gemm_onednn, repeats, a, b, c);
    best = onednn > best ? onednn : best;
    printf(" oneDNN %.1f", onednn);
#endif
    printf(" best %.1f\n", best);
    free(c);
    free(b);
    free(a);
    return 0;
}
