#include "values.h"
#include "device.h"
#include "error.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- elements ----------------------------------------------------------------------------------

// The two types of 16 bits: how many bits the exponent and the mantissa have.
struct half {
    int exponent_bits;
    int mantissa_bits;
};

static struct half half_of(enum dtype dtype) {
    return dtype == DTYPE_F16 ? (struct half){5, 10} : (struct half){8, 7};
}

static int half_bias(struct half h) {
    return (1 << (h.exponent_bits - 1)) - 1;
}

// By the definition of the format and in double, not by the tricks that a fast program uses.
static double half_decode(uint16_t bits, struct half h) {
    int exponent = (bits >> h.mantissa_bits) & ((1 << h.exponent_bits) - 1);
    int mantissa = bits & ((1 << h.mantissa_bits) - 1);
    double sign = bits >> 15 ? -1 : 1;
    if (exponent == (1 << h.exponent_bits) - 1) {
        return mantissa != 0 ? NAN : sign * INFINITY;
    }
    int scale = (exponent > 0 ? exponent : 1) - half_bias(h) - h.mantissa_bits;
    return sign * ldexp(exponent > 0 ? mantissa + (1 << h.mantissa_bits) : mantissa, scale);
}

// Rounds to the nearest, ties to even (rint's way), with subnormal numbers; what is too large
// becomes infinite.
static uint16_t half_encode(double x, struct half h) {
    int top = (1 << h.exponent_bits) - 1, smallest = 1 - half_bias(h);
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    uint16_t infinite = (uint16_t)(top << h.mantissa_bits);
    if (isnan(x)) {
        return (uint16_t)(infinite | 1 << (h.mantissa_bits - 1));
    }
    if (x == 0 || isinf(x)) {
        return sign | (x == 0 ? 0 : infinite);
    }
    int exponent = ilogb(x) > smallest ? ilogb(x) : smallest;
    int64_t units = (int64_t)rint(ldexp(fabs(x), h.mantissa_bits - exponent));
    // Where rounding carries into the next power of two, so does this addition.
    int64_t bits = ((int64_t)(exponent - smallest) << h.mantissa_bits) + units;
    return sign | (uint16_t)(bits < infinite ? bits : infinite);
}

static double decode(enum dtype dtype, const void *element) {
    float single;
    double whole;
    int32_t integer;
    uint16_t half;
    switch (dtype) {
    case DTYPE_F32:
        memcpy(&single, element, sizeof single);
        return single;
    case DTYPE_F64:
        memcpy(&whole, element, sizeof whole);
        return whole;
    case DTYPE_I32:
        memcpy(&integer, element, sizeof integer);
        return integer;
    case DTYPE_U8:
        return *(const uint8_t *)element;
    default:
        memcpy(&half, element, sizeof half);
        return half_decode(half, half_of(dtype));
    }
}

static void encode(enum dtype dtype, void *element, double x) {
    float single = (float)x;
    int32_t integer;
    uint16_t half;
    switch (dtype) {
    case DTYPE_F32:
        memcpy(element, &single, sizeof single);
        break;
    case DTYPE_F64:
        memcpy(element, &x, sizeof x);
        break;
    case DTYPE_I32:
        integer = (int32_t)x;
        memcpy(element, &integer, sizeof integer);
        break;
    case DTYPE_U8:
        *(uint8_t *)element = (uint8_t)x;
        break;
    default:
        half = half_encode(x, half_of(dtype));
        memcpy(element, &half, sizeof half);
    }
}

static void *at(const struct values *values, size_t i) {
    return (char *)values->data + i * dtype_size(values->dtype);
}

// ---- the values of a rank ----------------------------------------------------------------------

// The finaliser of splitmix64.
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

struct limits {
    double big;
    double small; // twice of it, added to big, changes nothing
    double largest;
    double normal; // the smallest normal number
    double smallest; // the smallest subnormal number
};

static struct limits limits_of(enum dtype dtype) {
    switch (dtype) {
    case DTYPE_F64:
        return (struct limits){1e17, 1, 0x1.fffffffffffffp1023, 0x1p-1022, 0x1p-1074};
    case DTYPE_F16:
        return (struct limits){30000, 0x1p-13, 65504, 0x1p-14, 0x1p-24};
    case DTYPE_BF16:
        return (struct limits){1e8, 1, 0x1.fep127, 0x1p-126, 0x1p-133};
    default:
        return (struct limits){1e8, 1, 0x1.fffffep127, 0x1p-126, 0x1p-149};
    }
}

// Places that hold something rare on every rank.
static double rare_value(size_t place, uint64_t random, struct limits limits) {
    double sign = random & 1 ? -1 : 1;
    bool here = (random >> 1 & 3) == 0;
    switch (place) {
    case 0:
        return -0.0;
    case 1: // zeros of both signs
        return sign * 0.0;
    case 2:
        return sign * (double)(random >> 8 & 1023) * limits.smallest;
    case 3: // about where the normal numbers begin
        return sign * (limits.normal + ((double)(random >> 8 & 63) - 32) * limits.smallest);
    case 4: // overflow, which depends on the order
        return sign * limits.largest;
    case 5:
        return here ? INFINITY : 1;
    case 6: // infinities of both signs make NaN
        return here ? sign * INFINITY : sign;
    case 7:
        return here ? NAN : sign;
    default:
        return sign;
    }
}

// Big on one rank and minus big on another one, so that what is added between the two is lost.
static double ordered_value(int rank, int size, size_t i, double unit, struct limits limits) {
    uint64_t random = mix(i);
    int plus = (int)(random % (uint64_t)size);
    int minus = (plus + 1 + (int)(random >> 32) % (size > 1 ? size - 1 : 1)) % size;
    if (rank == plus || rank == minus) {
        return rank == plus ? limits.big : -limits.big;
    }
    return limits.small * (1 + unit);
}

static double value_of(int rank, int size, size_t i, enum dtype dtype) {
    enum { RARE = 9, EVERY = 7 };
    uint64_t random = mix(mix((uint64_t)rank + 1) + i);
    double unit = (double)(random >> 11) * 0x1p-53; // in [0, 1)
    double sign = random & 1 ? -1 : 1;
    struct limits limits = limits_of(dtype);
    if (dtype == DTYPE_I32) {
        return floor(unit * 2e8) - 1e8;
    }
    if (dtype == DTYPE_U8) {
        return (double)(random >> 56);
    }
    switch (i % EVERY) {
    case 0:
        return rare_value(i / EVERY % RARE, random, limits);
    case 1:
    case 2:
        return ordered_value(rank, size, i, unit, limits);
    case 3: // within the range of all types
        return sign * ldexp(1 + unit, (int)(random >> 4 & 15) - 8);
    default:
        return sign * unit;
    }
}

struct values values_of_rank(int rank, int size, enum dtype dtype) {
    struct values values = {
        .data = malloc(VALUES * dtype_size(dtype)),
        .dtype = dtype,
    };
    CHECK(values.data != NULL);
    for (size_t i = 0; i < VALUES; i++) {
        encode(dtype, at(&values, i), value_of(rank, size, i, dtype));
    }
    return values;
}

void values_free(struct values *values) {
    free(values->data);
    *values = (struct values){0};
}

// ---- reductions --------------------------------------------------------------------------------

// One element's sum. All but F64 and the integers are added in F32.
static void add_in_order(const struct values *parts, int count, size_t i, void *sum) {
    enum dtype dtype = parts[0].dtype;
    double total = decode(dtype, at(&parts[0], i));
    for (int r = 1; r < count; r++) {
        double x = decode(dtype, at(&parts[r], i));
        bool exact = dtype == DTYPE_F64 || dtype == DTYPE_I32 || dtype == DTYPE_U8;
        // Both operands are floats, so the float of the sum in double would be rounded twice.
        total = exact ? total + x : (double)((float)total + (float)x);
    }
    encode(dtype, sum, total);
}

static void largest(const struct values *parts, int count, size_t i, void *max) {
    enum dtype dtype = parts[0].dtype;
    double most = decode(dtype, at(&parts[0], i));
    for (int r = 1; r < count; r++) {
        double x = decode(dtype, at(&parts[r], i));
        most = isnan(x) || x > most ? x : most;
    }
    encode(dtype, max, most);
}

struct values values_reduced(const struct values *parts, int count, enum comm_op op) {
    struct values values = {
        .data = malloc(VALUES * dtype_size(parts[0].dtype)),
        .dtype = parts[0].dtype,
        .is_max = op == COMM_MAX,
    };
    CHECK(values.data != NULL);
    for (size_t i = 0; i < VALUES; i++) {
        if (op == COMM_MAX) {
            largest(parts, count, i, at(&values, i));
        } else {
            add_in_order(parts, count, i, at(&values, i));
        }
    }
    return values;
}

size_t values_order_shows(const struct values *parts, int count) {
    struct values reverse[64];
    CHECK(count <= 64);
    for (int r = 0; r < count; r++) {
        reverse[r] = parts[count - 1 - r];
    }
    struct values forth = values_reduced(parts, count, COMM_SUM);
    struct values back = values_reduced(reverse, count, COMM_SUM);
    size_t different = 0;
    for (size_t i = 0; i < VALUES; i++) {
        different += !values_equal(&forth, at(&forth, i), at(&back, i));
    }
    values_free(&back);
    values_free(&forth);
    return different;
}

// ---- tensors -----------------------------------------------------------------------------------

// Elements from `done` on that lie in one piece both in the tensor and in the table.
static size_t run_length(size_t count, size_t done, size_t shift) {
    size_t in_table = VALUES - (shift + done) % VALUES;
    return in_table < count - done ? in_table : count - done;
}

void values_fill(struct tensor t, const struct values *values, size_t shift) {
    size_t count = tensor_count(t), run;
    for (size_t done = 0; done < count; done += run) {
        run = run_length(count, done, shift);
        device_upload(tensor_view(t, done, 1, run), at(values, (shift + done) % VALUES));
    }
}

bool values_equal(const struct values *values, const void *found, const void *expected) {
    enum dtype dtype = values->dtype;
    if (memcmp(found, expected, dtype_size(dtype)) == 0) {
        return true;
    }
    double a = decode(dtype, found), b = decode(dtype, expected);
    if (values->is_max) {
        return isnan(b) || a == b;
    }
    return isnan(a) && isnan(b);
}

static int print_element(char *text, size_t size, enum dtype dtype, const void *element) {
    uint64_t bits = 0;
    memcpy(&bits, element, dtype_size(dtype)); // little endian
    return snprintf(text, size, "%.9g (0x%0*llx)", decode(dtype, element),
                    (int)dtype_size(dtype) * 2, (unsigned long long)bits);
}

bool values_check(struct tensor t, const struct values *values, size_t shift, size_t *wrong,
                  char *text, size_t text_size) {
    static char found[VALUES * sizeof(double)];
    size_t count = tensor_count(t), size = dtype_size(t.dtype), run;
    for (size_t done = 0; done < count; done += run) {
        run = run_length(count, done, shift);
        const char *expected = at(values, (shift + done) % VALUES);
        device_download(found, tensor_view(t, done, 1, run));
        if (memcmp(found, expected, run * size) == 0) {
            continue;
        }
        for (size_t i = 0; i < run; i++) {
            if (!values_equal(values, found + i * size, expected + i * size)) {
                char a[64], b[64];
                print_element(a, sizeof a, t.dtype, found + i * size);
                print_element(b, sizeof b, t.dtype, expected + i * size);
                snprintf(text, text_size, "found %s, expected %s", a, b);
                *wrong = done + i;
                return false;
            }
        }
    }
    return true;
}

uint64_t values_hash(struct tensor t, uint64_t hash) {
    static uint64_t words[VALUES];
    size_t count = tensor_count(t), size = dtype_size(t.dtype), run;
    for (size_t done = 0; done < count; done += run) {
        run = run_length(count, done, 0);
        device_download(words, tensor_view(t, done, 1, run));
        size_t bytes = run * size;
        memset((char *)words + bytes, 0, (sizeof *words - bytes % sizeof *words) % sizeof *words);
        for (size_t i = 0; i < (bytes + sizeof *words - 1) / sizeof *words; i++) {
            hash = mix(hash ^ words[i]);
        }
    }
    return mix(hash + count);
}
