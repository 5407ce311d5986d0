// A folder of its own for each test, removed with all that is in it.
#ifndef SHARD_TESTS_SCRATCH_H
#define SHARD_TESTS_SCRATCH_H

#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { SCRATCH_PATH_SIZE = 1024 };

static char scratch_folder[256];

/** @brief For cmocka_unit_test_setup_teardown(): makes the folder. */
static inline int scratch_setup(void **state) {
    (void)state;
    snprintf(scratch_folder, sizeof scratch_folder, "/tmp/shard_test_XXXXXX");
    return mkdtemp(scratch_folder) != NULL ? 0 : -1;
}

static inline int scratch_remove(const char *path, const struct stat *status, int type,
                                 struct FTW *where) {
    (void)status;
    (void)type;
    (void)where;
    return remove(path);
}

/** @brief For cmocka_unit_test_setup_teardown(): removes the folder. */
static inline int scratch_teardown(void **state) {
    (void)state;
    return nftw(scratch_folder, scratch_remove, 8, FTW_DEPTH | FTW_PHYS);
}

/** @brief The path of @p name in the folder; valid until the sixteenth call after this one. */
static inline char *scratch_path(const char *name) {
    static char paths[16][SCRATCH_PATH_SIZE];
    static int next;
    char *path = paths[next++ % 16];
    snprintf(path, SCRATCH_PATH_SIZE, "%s/%s", scratch_folder, name);
    return path;
}

/** @brief Writes a file. */
static inline void scratch_write(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

/** @brief A file's content as a string; empty if there is no such file. */
static inline const char *scratch_read(const char *path) {
    static char text[4096];
    FILE *file = fopen(path, "rb");
    size_t count = 0;
    if (file != NULL) {
        count = fread(text, 1, sizeof text - 1, file);
        fclose(file);
    }
    text[count] = '\0';
    return text;
}

#define scratch_test(test) cmocka_unit_test_setup_teardown(test, scratch_setup, scratch_teardown)

#endif
