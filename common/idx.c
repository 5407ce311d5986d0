#include "idx.h"
#include "error.h"
#include "files.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

enum {
    BUFFER_BYTES = 1 << 16, // of the file, at a time
    FIRST_BYTES = 1 << 20, // the first allocation; then it doubles as bytes arrive
    DIMS_MAX = 4,
    PATH_BYTES = 4096,
    GZIP_WINDOW_BITS = 15 + 16, // zlib: the largest window, with gzip's header and checksum
};

// ---- bytes, whether they are compressed or not -------------------------------------------------

// Invariant: bytes that were taken from the file but not yet read are z.next_in, z.avail_in; for a
// plain file too.
struct stream {
    FILE *file;
    bool gzip;
    bool ended; // nothing follows
    char fault[128]; // empty, or why what follows cannot be read
    z_stream z;
    uint8_t buffer[BUFFER_BYTES];
};

// Makes sure that there is a byte of the file to look at. False at its end.
static bool stream_fill(struct stream *s) {
    if (s->z.avail_in == 0) {
        s->z.next_in = s->buffer;
        s->z.avail_in = (uInt)fread(s->buffer, 1, sizeof s->buffer, s->file);
        if (ferror(s->file)) {
            error_text(s->fault, sizeof s->fault, "%s", strerror(errno));
        }
    }
    return s->z.avail_in > 0;
}

static void stream_begin(struct stream *s, FILE *file) {
    memset(s, 0, sizeof *s);
    s->file = file;
    s->gzip = stream_fill(s) && s->z.avail_in >= 2 && s->buffer[0] == 0x1f && s->buffer[1] == 0x8b;
    if (s->gzip) {
        CHECK(inflateInit2(&s->z, GZIP_WINDOW_BITS) == Z_OK);
    }
}

static void stream_end(struct stream *s) {
    if (s->gzip) {
        inflateEnd(&s->z);
    }
}

// A gzip file is one or more members. Goes on to the next one, if there is one.
static void stream_next_member(struct stream *s) {
    if (!stream_fill(s)) {
        s->ended = true;
    } else if (s->z.next_in[0] != 0x1f) {
        error_text(s->fault, sizeof s->fault, "bytes that are not gzip follow the compressed data");
    } else {
        CHECK(inflateReset(&s->z) == Z_OK);
    }
}

// Decompresses at least one byte, or ends, or sets the fault.
static size_t stream_inflate(struct stream *s, uint8_t *out, size_t bytes) {
    size_t most = bytes < BUFFER_BYTES ? bytes : BUFFER_BYTES;
    s->z.next_out = out;
    s->z.avail_out = (uInt)most;
    if (!stream_fill(s)) {
        error_text(s->fault, sizeof s->fault, "the compressed data end too early");
        return 0;
    }
    int result = inflate(&s->z, Z_NO_FLUSH);
    size_t got = most - s->z.avail_out;
    if (result == Z_STREAM_END) {
        stream_next_member(s);
    } else if (result != Z_OK) {
        error_text(s->fault, sizeof s->fault, "the compressed data are broken: %s",
                   s->z.msg != NULL ? s->z.msg : zError(result));
    }
    return got;
}

static size_t stream_copy(struct stream *s, uint8_t *out, size_t bytes) {
    if (!stream_fill(s)) {
        s->ended = true;
        return 0;
    }
    size_t most = bytes < s->z.avail_in ? bytes : s->z.avail_in;
    memcpy(out, s->z.next_in, most);
    s->z.next_in += most;
    s->z.avail_in -= (uInt)most;
    return most;
}

// Reads up to `bytes`; fewer only at the end or at a fault.
static size_t stream_read(struct stream *s, uint8_t *out, size_t bytes) {
    size_t got = 0;
    while (got < bytes && !s->ended && s->fault[0] == '\0') {
        if (s->gzip) {
            got += stream_inflate(s, out + got, bytes - got);
        } else {
            got += stream_copy(s, out + got, bytes - got);
        }
    }
    return got;
}

// ---- the header --------------------------------------------------------------------------------

static const struct {
    uint8_t code;
    const char *name;
} ELEMENTS[] = {
    {0x08, "unsigned byte"},  {0x09, "signed byte"},  {0x0b, "16-bit integer"},
    {0x0c, "32-bit integer"}, {0x0d, "32-bit float"}, {0x0e, "64-bit float"},
};

static const char *element_name(uint8_t code) {
    for (size_t i = 0; i < sizeof ELEMENTS / sizeof ELEMENTS[0]; i++) {
        if (ELEMENTS[i].code == code) {
            return ELEMENTS[i].name;
        }
    }
    return NULL;
}

static uint32_t big_endian(const uint8_t *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

// "28 x 28" of the numbers in a header; `reversed` if their bytes are in the other order.
static void dims_text(char *text, size_t size, const uint8_t *dims, size_t dim_count,
                      bool reversed) {
    size_t length = 0;
    text[0] = '\0';
    for (size_t i = 0; i < dim_count && length < size; i++) {
        uint32_t dim = big_endian(dims + 4 * i);
        dim = reversed ? __builtin_bswap32(dim) : dim;
        length +=
            (size_t)snprintf(text + length, size - length, "%s%" PRIu32, i > 0 ? " x " : "", dim);
    }
}

// The file's first bytes for a message; what cannot be printed becomes a dot.
static bool refuse_first_bytes(struct stream *s, uint8_t first[32], size_t got, char *error,
                               size_t error_size) {
    char shown[33] = "";
    got += stream_read(s, first + got, 32 - got);
    for (size_t i = 0; i < got; i++) {
        shown[i] = first[i] >= 0x20 && first[i] < 0x7f ? (char)first[i] : '.';
    }
    return error_text(error, error_size,
                      "is not an IDX file: it begins with \"%s\"%s (bytes %02x %02x %02x %02x), "
                      "expected the bytes 00 00 08; download it again",
                      shown, first[0] == '<' ? ", a web page" : "", first[0], first[1], first[2],
                      first[3]);
}

// Reads and checks the magic number: two zero bytes, the type of the elements, the number of
// dimensions (that of an item and one more).
static bool read_magic(struct stream *s, size_t dim_count, char *error, size_t error_size) {
    uint8_t magic[32] = {0};
    size_t got = stream_read(s, magic, 4);
    if (s->fault[0] != '\0') {
        return error_text(error, error_size, "cannot be read: %s; download it again", s->fault);
    }
    if (got == 0) {
        return error_text(error, error_size, "is empty; expected an IDX file; download it again");
    }
    if (got == 4 && magic[3] == 0 && magic[2] == 0 && element_name(magic[1]) != NULL) {
        return error_text(error, error_size,
                          "is little-endian (its magic number is %02x %02x 00 00); expected a "
                          "big-endian IDX file (00 00 08 %02zx)",
                          magic[0], magic[1], dim_count + 1);
    }
    if (got < 4 || magic[0] != 0 || magic[1] != 0 || element_name(magic[2]) == NULL) {
        return refuse_first_bytes(s, magic, got, error, error_size);
    }
    if (magic[2] != ELEMENTS[0].code) {
        return error_text(error, error_size,
                          "has elements of type %s (0x%02x); expected %s (0x%02x)",
                          element_name(magic[2]), magic[2], ELEMENTS[0].name, ELEMENTS[0].code);
    }
    if (magic[3] != dim_count + 1) {
        return error_text(error, error_size,
                          "has %u dimension%s; expected %zu (magic number 0000%02x%02x, expected "
                          "000008%02zx); are the files of images and of labels swapped?",
                          magic[3], magic[3] == 1 ? "" : "s", dim_count + 1, magic[2], magic[3],
                          dim_count + 1);
    }
    return true;
}

// Compares the dims of an item with the expected ones.
static bool check_dims(const uint8_t *found, const size_t *dims, size_t dim_count, char *error,
                       size_t error_size) {
    bool same = true, reversed = true;
    char found_text[64], expected_text[64];
    uint8_t expected[4 * DIMS_MAX];
    for (size_t i = 0; i < dim_count; i++) {
        uint32_t big = __builtin_bswap32((uint32_t)dims[i]);
        memcpy(expected + 4 * i, &big, 4);
        same = same && big_endian(found + 4 * i) == dims[i];
        reversed = reversed && __builtin_bswap32(big_endian(found + 4 * i)) == dims[i];
    }
    if (same) {
        return true;
    }
    dims_text(found_text, sizeof found_text, found, dim_count, false);
    dims_text(expected_text, sizeof expected_text, expected, dim_count, false);
    return error_text(error, error_size, "has items of %s; expected %s%s", found_text,
                      expected_text,
                      reversed ? " (its sizes are little-endian; IDX files are big-endian)" : "");
}

static bool read_header(struct stream *s, const size_t *dims, size_t dim_count, size_t *count,
                        char *error, size_t error_size) {
    uint8_t sizes[4 * (DIMS_MAX + 1)];
    if (!read_magic(s, dim_count, error, error_size)) {
        return false;
    }
    size_t bytes = 4 * (dim_count + 1);
    size_t got = stream_read(s, sizes, bytes);
    if (got < bytes) {
        return error_text(
            error, error_size,
            "ends in its header: found %zu bytes, expected %zu%s%s; download it again", 4 + got,
            4 + bytes, s->fault[0] != '\0' ? "; " : "", s->fault);
    }
    *count = big_endian(sizes);
    return check_dims(sizes + 4, dims, dim_count, error, error_size);
}

// ---- the items ---------------------------------------------------------------------------------

// Reads up to `total` bytes into memory that grows with them. Returns how many there were.
static size_t read_body(struct stream *s, uint8_t **data, size_t total) {
    size_t capacity = total < FIRST_BYTES ? total : FIRST_BYTES;
    size_t got = 0;
    *data = malloc(capacity + 1);
    while (*data != NULL) {
        got += stream_read(s, *data + got, capacity - got);
        if (got < capacity || capacity == total) {
            return got;
        }
        capacity = total / 2 < capacity ? total : 2 * capacity;
        uint8_t *larger = realloc(*data, capacity);
        if (larger == NULL) {
            free(*data);
        }
        *data = larger;
    }
    error_text(s->fault, sizeof s->fault, "not enough memory for %zu bytes", capacity);
    return 0;
}

static bool refuse_short(const struct stream *s, size_t header, size_t got, size_t total,
                         const struct idx *out, char *error, size_t error_size) {
    const char *hint = s->fault;
    if (hint[0] == '\0' &&
        (uint64_t)__builtin_bswap32((uint32_t)out->count) * out->item_bytes == got) {
        hint = "its count is little-endian; IDX files are big-endian";
    }
    return error_text(error, error_size,
                      "is cut short: its header promises %zu items, so expected %zu bytes, found "
                      "%zu%s%s; download it again",
                      out->count, header + total, header + got, hint[0] != '\0' ? "; " : "", hint);
}

// Whether the stream ends here, with the right checksum.
static bool check_end(struct stream *s, size_t expected, size_t items, char *error,
                      size_t error_size) {
    uint8_t rest[4096];
    size_t more = 0, got;
    while ((got = stream_read(s, rest, sizeof rest)) > 0 && more < FIRST_BYTES) {
        more += got;
    }
    if (more > 0) {
        return error_text(
            error, error_size,
            "is too long: its header promises %zu items, so expected %zu bytes, found "
            "%s%zu",
            items, expected, got > 0 ? "more than " : "", expected + more);
    }
    if (s->fault[0] != '\0') {
        return error_text(error, error_size, "is damaged: %s, after %zu bytes; download it again",
                          s->fault, expected);
    }
    return true;
}

static bool parse_stream(struct idx *out, struct stream *s, const size_t *dims, size_t dim_count,
                         char *error, size_t error_size) {
    size_t total;
    out->item_bytes = 1;
    for (size_t i = 0; i < dim_count; i++) {
        CHECK(dims[i] > 0 && dims[i] <= UINT32_MAX);
        CHECK(!__builtin_mul_overflow(out->item_bytes, dims[i], &out->item_bytes));
    }
    if (!read_header(s, dims, dim_count, &out->count, error, error_size)) {
        return false;
    }
    if (__builtin_mul_overflow(out->count, out->item_bytes, &total) || total > SIZE_MAX / 2) {
        return error_text(error, error_size, "promises %zu items, more than memory can hold",
                          out->count);
    }
    size_t header = 4 + 4 * (dim_count + 1);
    size_t got = read_body(s, &out->data, total);
    if (out->data == NULL || got < total) {
        return refuse_short(s, header, got, total, out, error, error_size);
    }
    return check_end(s, header + total, out->count, error, error_size);
}

bool idx_parse(struct idx *out, FILE *file, const size_t *dims, size_t dim_count, char *error,
               size_t error_size) {
    CHECK(dim_count <= DIMS_MAX);
    struct stream *s = malloc(sizeof *s);
    CHECK(s != NULL);
    *out = (struct idx){0};
    stream_begin(s, file);
    bool good = parse_stream(out, s, dims, dim_count, error, error_size);
    stream_end(s);
    free(s);
    if (!good) {
        idx_free(out);
    }
    return good;
}

void idx_read(struct idx *out, const char *path, const size_t *dims, size_t dim_count) {
    char error[ERROR_TEXT_SIZE];
    FILE *file = files_open(path, NULL, error, sizeof error);
    if (file == NULL) {
        error_user("%s", error);
    }
    bool good = idx_parse(out, file, dims, dim_count, error, sizeof error);
    fclose(file);
    if (!good) {
        error_user("%s: the file %s", path, error);
    }
}

void idx_free(struct idx *idx) {
    free(idx->data);
    *idx = (struct idx){0};
}

// ---- images and labels -------------------------------------------------------------------------

// The name of the file as it is spelt in this folder.
static void find_file(char *path, const char *dir, const char *part, const char *what, int dims) {
    static const char *const spellings[][2] = {{"-", ""}, {"-", ".gz"}, {".", ""}, {".", ".gz"}};
    struct stat status;
    for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
        int length = snprintf(path, PATH_BYTES, "%s/%s-%s%sidx%d-ubyte%s", dir, part, what,
                              spellings[i][0], dims, spellings[i][1]);
        if (length >= PATH_BYTES) {
            error_user("%s: the path is too long", dir);
        }
        if (lstat(path, &status) == 0) {
            return;
        }
        if (errno != ENOENT) {
            error_user("%s: %s", path, strerror(errno));
        }
    }
    error_user(
        "%s: the folder has no file %s-%s-idx%d-ubyte, with or without .gz; run ./run setup, which "
        "installs dataset-fashion-mnist, or name a folder in MNIST's format with --data DIR",
        dir, part, what, dims);
}

static void check_dir(const char *dir) {
    struct stat status;
    if (stat(dir, &status) != 0) {
        error_user("%s: %s; expected a folder in MNIST's format: run ./run setup, which installs "
                   "dataset-fashion-mnist, or name one with --data DIR",
                   dir, strerror(errno));
    }
    if (!S_ISDIR(status.st_mode)) {
        error_user("%s: is not a folder; name a folder in MNIST's format with --data DIR", dir);
    }
}

static void check_labels(const char *path, const uint8_t *labels, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (labels[i] >= IMAGES_CLASSES) {
            error_user("%s: label %zu has the value %u; expected 0 to %d", path, i, labels[i],
                       IMAGES_CLASSES - 1);
        }
    }
}

void images_open(struct images *out, const char *dir, const char *part) {
    static const size_t dims[] = {IMAGES_HEIGHT, IMAGES_WIDTH};
    char images_path[PATH_BYTES], labels_path[PATH_BYTES];
    struct idx images, labels;
    check_dir(dir);
    find_file(images_path, dir, part, "images", 3);
    find_file(labels_path, dir, part, "labels", 1);
    idx_read(&images, images_path, dims, sizeof dims / sizeof dims[0]);
    idx_read(&labels, labels_path, NULL, 0);
    if (images.count != labels.count) {
        error_user("%s has %zu images, but %s has %zu labels; expected one label for each image",
                   images_path, images.count, labels_path, labels.count);
    }
    if (images.count == 0) {
        error_user("%s: the file has no images; expected at least one", images_path);
    }
    check_labels(labels_path, labels.data, labels.count);
    *out = (struct images){
        .pixels = images.data,
        .labels = labels.data,
        .count = images.count,
    };
}

void images_free(struct images *images) {
    free(images->pixels);
    free(images->labels);
    *images = (struct images){0};
}
