// Runs a fuzz target on mutations of its seeds: the same ones every time, with any compiler.
//
//     fuzz_idx [ITERATIONS]
//
// With clang and -fsanitize=fuzzer the target needs no driver, and searches by coverage.
#include "fuzz.h"
#include "random.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEEDS_MAX = 16,
    SIZE_MAX_BYTES = 4096,
    MUTATIONS_MAX = 6,
    ITERATIONS = 20000,
};

struct input {
    uint8_t bytes[SIZE_MAX_BYTES];
    size_t size;
};

static struct input seeds[SEEDS_MAX];
static size_t seed_count;
static uint64_t drawn;

// A number below `bound`, which is at least 1.
static size_t draw(size_t bound) {
    return random_word((struct random_key){0}, drawn++) % bound;
}

static void erase(struct input *in) {
    size_t at = draw(in->size), count = 1 + draw(in->size - at);
    memmove(in->bytes + at, in->bytes + at + count, in->size - at - count);
    in->size -= count;
}

// Inserts bytes of a seed, or of the input itself.
static void splice(struct input *in, const struct input *from) {
    if (from->size == 0) {
        return;
    }
    uint8_t part[32];
    size_t begin = draw(from->size), most = from->size - begin;
    size_t count = 1 + draw(most < sizeof part ? most : sizeof part);
    size_t at = draw(in->size + 1);
    if (in->size + count > SIZE_MAX_BYTES) {
        return;
    }
    memcpy(part, from->bytes + begin, count);
    memmove(in->bytes + at + count, in->bytes + at, in->size - at);
    memcpy(in->bytes + at, part, count);
    in->size += count;
}

static void mutate(struct input *in) {
    static const uint8_t interesting[] = {0x00, 0xff, 0x7f, 0x80, '"', '\\',
                                          '0',  '9',  '[',  '}',  ','};
    if (in->size == 0) {
        return;
    }
    size_t at = draw(in->size);
    switch (draw(6)) {
    case 0:
        in->bytes[at] ^= (uint8_t)(1 << draw(8));
        break;
    case 1:
        in->bytes[at] = interesting[draw(sizeof interesting)];
        break;
    case 2:
        erase(in);
        break;
    case 3:
        splice(in, &seeds[draw(seed_count)]);
        break;
    case 4:
        splice(in, in);
        break;
    default:
        in->bytes[at] = (uint8_t)(in->bytes[at] + draw(16) - 8);
        break;
    }
}

// A copy of exactly the input's size, so that a read beyond its end is found.
static void run(const struct input *in) {
    uint8_t *copy = malloc(in->size > 0 ? in->size : 1);
    if (copy == NULL) {
        abort();
    }
    memcpy(copy, in->bytes, in->size);
    LLVMFuzzerTestOneInput(copy, in->size);
    free(copy);
}

int main(int argc, char **argv) {
    long iterations = argc > 1 ? strtol(argv[1], NULL, 10) : ITERATIONS;
    while (seed_count < SEEDS_MAX &&
           (seeds[seed_count].size =
                fuzz_seed(seed_count, seeds[seed_count].bytes, SIZE_MAX_BYTES)) > 0) {
        run(&seeds[seed_count++]);
    }
    if (seed_count == 0) {
        fprintf(stderr, "FAIL: no seeds\n");
        return 1;
    }
    for (long i = 0; i < iterations; i++) {
        struct input in = seeds[draw(seed_count)];
        for (size_t mutations = 1 + draw(MUTATIONS_MAX); mutations > 0; mutations--) {
            mutate(&in);
        }
        run(&in);
    }
    printf("PASS: %ld mutations of %zu seeds\n", iterations, seed_count);
    return 0;
}
