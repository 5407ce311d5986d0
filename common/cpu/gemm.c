// Matrix products by a library: oneDNN's sgemm where it was found, else CBLAS.
//
// Measured on the shapes of the llama sizes, oneDNN's was faster than OpenBLAS's for every shape
// and every way to cut it (by a tenth to a half for blocks of 128 rows), so there is no choice to
// make by shape.
#include "cpu.h"
#include <omp.h>
#include <string.h>
#ifdef SHARD_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#else
#include <cblas.h>
#endif

// With nothing to sum, c = 0 or c += 0.
static void empty_sum(size_t m, size_t n, float *c, size_t ldc, bool add) {
    for (size_t i = 0; i < m && n > 0 && !add; i++) {
        memset(c + i * ldc, 0, n * sizeof *c);
    }
}

static void library_gemm(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k,
                         const float *a, size_t lda, const float *b, size_t ldb, float *c,
                         size_t ldc, bool add) {
#ifdef SHARD_HAVE_ONEDNN
    dnnl_status_t status =
        dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', (dnnl_dim_t)m, (dnnl_dim_t)n,
                   (dnnl_dim_t)k, 1.0f, a, (dnnl_dim_t)lda, b, (dnnl_dim_t)ldb, add ? 1.0f : 0.0f,
                   c, (dnnl_dim_t)ldc);
    CHECK(status == dnnl_success);
#else
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f,
                a, (blasint)lda, b, (blasint)ldb, add ? 1.0f : 0.0f, c, (blasint)ldc);
#endif
}

void cpu_gemm(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k, const float *a,
              size_t lda, const float *b, size_t ldb, float *c, size_t ldc, bool add) {
    if (m == 0 || n == 0 || k == 0) {
        empty_sum(m, n, c, ldc, add);
        return;
    }
    // Outside of a parallel region the library would take all threads, and other numbers of them
    // give other bits. The setting is this thread's own.
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    library_gemm(transpose_a, transpose_b, m, n, k, a, lda, b, ldb, c, ldc, add);
    omp_set_num_threads(threads);
}
