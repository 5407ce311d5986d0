// Errors: what the user can mend, and what nobody expected.
#ifndef SHARD_ERROR_H
#define SHARD_ERROR_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * @brief Ends the program because of the user's mistake: bad flag, missing data, broken file.
 *
 * Local; call it before the first collective. One message on stderr (what was found, what was
 * expected, what to do), then exit code 2. With several ranks one of them prints it: comm_init()
 * installs a hook that agrees on which.
 * @param format printf format of one or more whole lines, without the program's name and without a
 *               final newline; control characters in what it quotes, newlines too, become '?'
 */
void error_user(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/** @brief Prints a line "warning: …" on stderr, disarmed as by error_user(). Local; what concerns
 * all ranks one of them prints. */
void error_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));

/**
 * @brief Ends all ranks because something failed that should not: rank, host and message on stderr,
 * then abort.
 *
 * Local.
 */
void error_fatal(const char *file, int line, const char *format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));

/** @brief Evaluates @p x once; if it is false, ends all ranks with file, line and expression. */
#define CHECK(x)                                                                                   \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            error_fatal(__FILE__, __LINE__, "CHECK(%s) failed", #x);                               \
        }                                                                                          \
    } while (0)

/**
 * @brief What the transports of comm.h put in place, so that an error of one rank ends all of them.
 */
struct error_hooks {
    int rank; // printed in front of fatal messages
    // Agrees with the other ranks, prints from one, exits 2. The text is what is to be printed: the
    // program's name in front, a newline at the end.
    void (*user)(const char *text);
    void (*abort)(void); // ends all ranks
};

/** @brief Installs the hooks; fields that are NULL keep the behaviour of a single process. Local.
 */
void error_set_hooks(struct error_hooks hooks);

/** @brief The rank that error_set_hooks() was told; 0 before. Local. */
int error_rank(void);

// Large enough for the texts of functions that report a failure to their caller: two paths and a
// sentence.
enum { ERROR_TEXT_SIZE = 10240 };

/**
 * @brief Writes the reason of a failure into the caller's buffer, cut to fit.
 *
 * Local.
 * @param error (error_size)
 * @return false, so that a function can say `return error_text(error, error_size, …);`
 */
bool error_text(char *error, size_t error_size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
