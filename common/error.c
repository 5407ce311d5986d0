#include "error.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TEXT_BYTES = 16384, // longest text; what is longer is cut
    HOST_BYTES = 256,
};

static struct error_hooks error_hooks;

void error_set_hooks(struct error_hooks hooks) {
    error_hooks = hooks;
}

int error_rank(void) {
    return error_hooks.rank;
}

// Names and words that a message quotes come from files and command lines. What a terminal would
// take for a command (C0 with the newline, DEL, and C1 in UTF-8) becomes a question mark.
static void text_disarm(char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        unsigned char next = i + 1 < length ? (unsigned char)text[i + 1] : 0;
        if (c < 0x20 || c == 0x7f) {
            text[i] = '?';
        } else if (c == 0xc2 && next >= 0x80 && next < 0xa0) {
            text[i] = text[i + 1] = '?';
        }
    }
}

// Puts the newlines of the format itself, which are meant, back into the text made of it: each
// stands where the text of the format up to it ends.
__attribute__((format(printf, 3, 0))) static void text_newlines(char *text, size_t length,
                                                                const char *format, va_list args) {
    for (const char *at = strchr(format, '\n'); at != NULL; at = strchr(at + 1, '\n')) {
        char *before = strndup(format, (size_t)(at - format));
        va_list again;
        va_copy(again, args);
        int place = before != NULL ? vsnprintf(NULL, 0, before, again) : -1;
        va_end(again);
        free(before);
        if (place >= 0 && (size_t)place < length) {
            text[place] = '\n';
        }
    }
}

// Appends to the text of `length` bytes and leaves room for a newline. Returns the new length.
__attribute__((format(printf, 3, 0))) static size_t text_append(char *text, size_t length,
                                                                const char *format, va_list args) {
    size_t room = TEXT_BYTES - 1 - length;
    va_list again;
    va_copy(again, args);
    int written = vsnprintf(text + length, room, format, args);
    size_t count = written < 0 ? 0 : (size_t)written < room ? (size_t)written : room - 1;
    text_disarm(text + length, count);
    text_newlines(text + length, count, format, again);
    va_end(again);
    return length + count;
}

__attribute__((format(printf, 3, 4))) static size_t text_format(char *text, size_t length,
                                                                const char *format, ...) {
    va_list args;
    va_start(args, format);
    length = text_append(text, length, format, args);
    va_end(args);
    return length;
}

// On a terminal a progress bar may stand where the message begins.
static void line_clear(void) {
    if (isatty(STDOUT_FILENO) == 1 && isatty(STDERR_FILENO) == 1) {
        fputs("\r\033[K", stderr);
    }
}

// Ends the text with a newline and hands it to stderr in one piece, so that the lines of several
// ranks do not mix.
static void text_print(const char *text, size_t length) {
    line_clear();
    while (length > 0) {
        ssize_t written = write(STDERR_FILENO, text, length);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return; // nobody to tell
        }
        text += written;
        length -= (size_t)written;
    }
}

static size_t text_finish(char *text, size_t length) {
    text[length++] = '\n';
    text[length] = '\0';
    return length;
}

void error_user(const char *format, ...) {
    char text[TEXT_BYTES];
    size_t length = text_format(text, 0, "%s: ", program_invocation_short_name);
    va_list args;
    va_start(args, format);
    length = text_append(text, length, format, args);
    va_end(args);
    length = text_finish(text, length);
    if (error_hooks.user != NULL) {
        error_hooks.user(text);
    } else {
        text_print(text, length);
    }
    exit(2);
}

void error_warning(const char *format, ...) {
    char text[TEXT_BYTES];
    size_t length = text_format(text, 0, "warning: ");
    va_list args;
    va_start(args, format);
    length = text_append(text, length, format, args);
    va_end(args);
    length = text_finish(text, length);
    text_print(text, length);
}

void error_fatal(const char *file, int line, const char *format, ...) {
    char text[TEXT_BYTES];
    char host[HOST_BYTES] = "unknown host";
    gethostname(host, sizeof host - 1);
    size_t length =
        text_format(text, 0, "rank %d on %s: %s:%d: ", error_hooks.rank, host, file, line);
    va_list args;
    va_start(args, format);
    length = text_append(text, length, format, args);
    va_end(args);
    length = text_finish(text, length);
    text_print(text, length);
    if (error_hooks.abort != NULL) {
        error_hooks.abort();
    }
    abort();
}

bool error_text(char *error, size_t error_size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, error_size, format, args);
    va_end(args);
    return false;
}
