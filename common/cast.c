#include "cast.h"
#include "error.h"
#include <string.h>

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// bf16 is the upper half of an f32.
static uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static float from_bf16(uint16_t h) {
    return from_bits((uint32_t)h << 16);
}

// f16 has 5 bits of exponent (bias 15, f32: 127) and 10 of mantissa (f32: 23). Below 2^-14 it is a
// multiple of 2^-24, which is the spacing of f32 numbers from 0.5 to 1: adding 0.5 rounds to it.
static uint16_t to_f16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t size = bits & 0x7fffffff;
    uint32_t normal = (size - ((127 - 15) << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t small = bits_of(from_bits(size) + 0.5f) - 0x3f000000;
    uint32_t h = size < 0x38800000 ? small : normal; // 2^-14
    h = size >= 0x477ff000 ? 0x7c00 : h; // 65520 and more: infinity
    h = size > 0x7f800000 ? (0x7e00 | (size >> 13 & 0x3ff)) : h;
    return (uint16_t)(sign | h);
}

static float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t size = h & 0x7fff;
    uint32_t normal = (size << 13) + ((127 - 15) << 23);
    uint32_t small = bits_of((float)(int32_t)size * 0x1p-24f);
    uint32_t bits = size < 0x400 ? small : normal;
    bits = size >= 0x7c00 ? (0x7f800000 | (size & 0x3ff) << 13) : bits;
    return from_bits(sign | bits);
}

void cast_from_f32(void *y, enum dtype dtype, const float *x, size_t count) {
    switch (dtype) {
    case DTYPE_F64:
        for (size_t i = 0; i < count; i++) {
            ((double *)y)[i] = x[i];
        }
        return;
    case DTYPE_BF16:
        for (size_t i = 0; i < count; i++) {
            ((uint16_t *)y)[i] = to_bf16(x[i]);
        }
        return;
    case DTYPE_F16:
        for (size_t i = 0; i < count; i++) {
            ((uint16_t *)y)[i] = to_f16(x[i]);
        }
        return;
    default:
        error_fatal(__FILE__, __LINE__, "no cast from F32 to %s", dtype_name(dtype));
    }
}

void cast_to_f32(float *y, const void *x, enum dtype dtype, size_t count) {
    switch (dtype) {
    case DTYPE_F64:
        for (size_t i = 0; i < count; i++) {
            y[i] = (float)((const double *)x)[i];
        }
        return;
    case DTYPE_BF16:
        for (size_t i = 0; i < count; i++) {
            y[i] = from_bf16(((const uint16_t *)x)[i]);
        }
        return;
    case DTYPE_F16:
        for (size_t i = 0; i < count; i++) {
            y[i] = from_f16(((const uint16_t *)x)[i]);
        }
        return;
    case DTYPE_U8:
        for (size_t i = 0; i < count; i++) {
            y[i] = ((const uint8_t *)x)[i];
        }
        return;
    default:
        error_fatal(__FILE__, __LINE__, "no cast from %s to F32", dtype_name(dtype));
    }
}
