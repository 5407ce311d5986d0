// Any bytes as an IDX file: the first byte chooses what is expected, the rest is the file.
#include "error.h"
#include "fuzz.h"
#include "idx.h"
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

static const size_t DIMS[] = {2, 3};

// Items that are accepted must all be there: the sum reads each byte.
static void check(const struct idx *idx, size_t dim_count) {
    volatile uint8_t sum = 0;
    CHECK(idx->item_bytes == (dim_count == 0 ? 1 : 6));
    for (size_t i = 0; i < idx->count * idx->item_bytes; i++) {
        sum = (uint8_t)(sum + idx->data[i]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[ERROR_TEXT_SIZE] = "";
    struct idx idx;
    if (size < 2) {
        return 0;
    }
    size_t dim_count = data[0] % 2 == 0 ? 2 : 0;
    FILE *file = fmemopen((void *)(data + 1), size - 1, "rb");
    CHECK(file != NULL);
    if (idx_parse(&idx, file, DIMS, dim_count, error, sizeof error)) {
        check(&idx, dim_count);
    } else {
        CHECK(error[0] != '\0' && idx.data == NULL);
    }
    idx_free(&idx);
    fclose(file);
    return 0;
}

static size_t compress_seed(const uint8_t *bytes, size_t size, uint8_t *out, size_t capacity) {
    z_stream z = {0};
    CHECK(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    z.next_in = (uint8_t *)bytes;
    z.avail_in = (uInt)size;
    z.next_out = out;
    z.avail_out = (uInt)capacity;
    CHECK(deflate(&z, Z_FINISH) == Z_STREAM_END);
    deflateEnd(&z);
    return capacity - z.avail_out;
}

size_t fuzz_seed(size_t k, uint8_t *out, size_t capacity) {
    static const uint8_t images[] = "\0\0\10\3\0\0\0\2\0\0\0\2\0\0\0\3abcdefghijkl";
    static const uint8_t labels[] = "\0\0\10\1\0\0\0\5\0\1\2\3\4";
    bool is_labels = k % 2 == 1;
    const uint8_t *bytes = is_labels ? labels : images;
    size_t size = is_labels ? sizeof labels - 1 : sizeof images - 1;
    if (k >= 4) {
        return 0;
    }
    out[0] = is_labels;
    if (k >= 2) {
        return 1 + compress_seed(bytes, size, out + 1, capacity - 1);
    }
    memcpy(out + 1, bytes, size);
    return 1 + size;
}
