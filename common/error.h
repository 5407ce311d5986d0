// Errors: what the user can mend, and what nobody expected.
#ifndef SHARD_ERROR_H
#define SHARD_ERROR_H

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
 *               final newline.
 */
_Noreturn void error_user(const char *format, ...) __attribute__((format(printf, 1, 2)));

/**
 * @brief Ends all ranks because something failed that should not: rank, host and message on stderr,
 * then abort.
 *
 * Local.
 */
_Noreturn void error_fatal(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

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
    void (*user)(const char *message); // agrees with the other ranks, prints from one, exits 2
    void (*abort)(void); // ends all ranks
};

/** @brief Installs the hooks; fields that are NULL keep the behaviour of a single process. Local.
 */
void error_set_hooks(struct error_hooks hooks);

#ifdef __cplusplus
}
#endif
#endif
