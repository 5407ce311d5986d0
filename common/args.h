// Command-line flags, from one table.
#ifndef SHARD_ARGS_H
#define SHARD_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum arg_kind {
    ARG_NONE, // ends a table
    ARG_INT, // value is int64_t *
    ARG_DOUBLE, // value is double *
    ARG_STRING, // value is const char **, NULL when not given
    ARG_CHOICE, // value is const char **, one of the words in choices
    ARG_FLAG, // value is bool *, takes no argument
};

/**
 * @brief One flag. The value that *value holds before args_parse() is the default.
 *
 * Use designated initializers. A zero min and max mean "no bound"; a max that is below min or
 * infinite means "min and more", a min that is minus infinity "max and less".
 */
struct arg {
    const char *name; // with its dashes: "--batch"
    enum arg_kind kind;
    void *value; // where the value goes
    double min; // smallest legal value
    double max; // largest legal value
    const char *choices; // "sgd|adamw|adadelta"
    const char *unit; // what --help calls the argument: "N", "DIR", "FILE"
    const char *help; // one line
    const char *group; // heading in --help; NULL: that of the flag before
    const char *absent; // what --help prints as default instead of the value: "by --size"
};

/**
 * @brief Fills the values of several tables from the command line.
 *
 * Local. Takes `--name value` and `--name=value`. `--help` prints all flags with their defaults and
 * exits 0 (rank 0 prints, see error_rank()), 1 if they cannot be printed. An unknown flag (the
 * nearest name is suggested), a flag given twice, a missing or malformed argument, a number out of
 * its range or with a fraction where none may be, and a word that is not a flag are the user's
 * mistake: error_user().
 * @param program  one line for --help: what the program does
 * @param tables   (table_count) tables, each ended by ARG_NONE; copied, but not their strings
 */
void args_parse(int argc, char **argv, const char *program, const struct arg *const *tables,
                size_t table_count);

/** @brief Whether the flag was on the command line of the last args_parse(). Local. */
bool args_given(const char *name);

/** @brief Calls @p each for every flag of the last args_parse(), with its value in words. Local. */
void args_each(void (*each)(const char *name, const char *value));

#ifdef __cplusplus
}
#endif
#endif
