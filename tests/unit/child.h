// Runs code that ends the process, and keeps what it printed.
#ifndef SHARD_TESTS_CHILD_H
#define SHARD_TESTS_CHILD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { CHILD_TEXT_SIZE = 16384 };

/** @brief What became of a child process. */
struct child {
    int exit_code; // -1 if a signal ended it
    int signal; // 0 if it exited
    char out[CHILD_TEXT_SIZE];
    char err[CHILD_TEXT_SIZE];
};

static inline void child_collect(FILE *file, char *text) {
    rewind(file);
    size_t length = fread(text, 1, CHILD_TEXT_SIZE - 1, file);
    text[length] = '\0';
    fclose(file);
}

/** @brief Calls @p body in a child process, which exits with 0 if it returns. */
static inline struct child child_run(void (*body)(void *), void *argument) {
    static struct child child;
    FILE *out = tmpfile(), *err = tmpfile();
    int status;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(out != NULL && err != NULL && pid >= 0);
    if (pid == 0) {
        dup2(fileno(out), STDOUT_FILENO);
        dup2(fileno(err), STDERR_FILENO);
        body(argument);
        exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    child.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    child.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    child_collect(out, child.out);
    child_collect(err, child.err);
    return child;
}

/** @brief Fails unless @p text contains @p part; prints both. */
static inline void assert_contains(const char *text, const char *part) {
    if (strstr(text, part) == NULL) {
        fail_msg("expected \"%s\" in \"%s\"", part, text);
    }
}

/** @brief Fails unless the child ended as error_user() does, with all (NULL-ended) parts in the
 * message. */
static inline void assert_user_error(const struct child *child, const char *const *parts) {
    if (child->exit_code != 2) {
        fail_msg("expected exit code 2, got %d (signal %d): %s", child->exit_code, child->signal,
                 child->err);
    }
    for (size_t i = 0; parts[i] != NULL; i++) {
        assert_contains(child->err, parts[i]);
    }
}

#define PARTS(...)                                                                                 \
    (const char *const[]) {                                                                        \
        __VA_ARGS__, NULL                                                                          \
    }

#endif
