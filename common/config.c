#include "config.h"
#include "error.h"
#include "files.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TEXT_MAX = 1 << 16, // longest config.json
    OURS_MAX = 4096,
    SHOWN_MAX = 60, // characters of a value in a message
};

// ---- JSON --------------------------------------------------------------------------------------

// A value as it stands in the text; NULL: there is none.
struct value {
    const char *text;
    size_t length;
};

// Each of these goes over something at `at` and returns what follows, or NULL if it is broken.

static const char *skip_blanks(const char *at) {
    return at + strspn(at, " \t\r\n");
}

static const char *skip_string(const char *at) {
    if (*at++ != '"') {
        return NULL;
    }
    while (*at != '"') {
        at += *at == '\\';
        if (*at == '\0') {
            return NULL;
        }
        at++;
    }
    return at + 1;
}

static const char *skip_value(const char *at) {
    static const char WORD[] = "+-.0123456789"
                               "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    size_t depth = 0;
    do {
        size_t word = strspn(at, WORD);
        if (word > 0) {
            at += word;
        } else if (*at == '"') {
            at = skip_string(at);
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (depth > 0 && *at != '\0') {
            depth -= *at == '}' || *at == ']';
            at++;
        } else {
            return NULL;
        }
    } while (at != NULL && depth > 0);
    return at;
}

// Finds a member of an object; of several the last. NULL if the object is broken, else its end.
static const char *object_find(const char *at, const char *key, struct value *found) {
    size_t key_length = strlen(key);
    *found = (struct value){0};
    if (*at++ != '{') {
        return NULL;
    }
    at = skip_blanks(at);
    while (*at != '}') {
        const char *name = at + 1;
        at = skip_string(at);
        if (at == NULL) {
            return NULL;
        }
        bool same = (size_t)(at - 1 - name) == key_length && memcmp(name, key, key_length) == 0;
        at = skip_blanks(at);
        if (*at != ':') {
            return NULL;
        }
        const char *value = skip_blanks(at + 1);
        at = skip_value(value);
        if (at == NULL) {
            return NULL;
        }
        if (same) {
            *found = (struct value){value, (size_t)(at - value)};
        }
        at = skip_blanks(at);
        if (*at == ',') {
            at = skip_blanks(at + 1);
            if (*at != '"') {
                return NULL;
            }
        } else if (*at != '}') {
            return NULL;
        }
    }
    return at + 1;
}

static bool is_text(struct value v, const char *text) {
    return v.text != NULL && v.length == strlen(text) && memcmp(v.text, text, v.length) == 0;
}

// The member of that name; none if it is null.
static struct value member(const char *object, const char *key) {
    struct value found;
    object_find(object, key, &found);
    return is_text(found, "null") ? (struct value){0} : found;
}

static bool same(struct value a, struct value b) {
    bool numbers = strchr("\"{[tf", a.text[0]) == NULL && strchr("\"{[tf", b.text[0]) == NULL;
    if (numbers) {
        return strtod(a.text, NULL) == strtod(b.text, NULL);
    }
    return a.length == b.length && memcmp(a.text, b.text, a.length) == 0;
}

// For "%.*s".
static int shown(struct value v) {
    return (int)(v.length < SHOWN_MAX ? v.length : SHOWN_MAX);
}

// ---- the file ----------------------------------------------------------------------------------

// The text of the file, checked to be an object; NULL if there is no file. free() it.
static char *read_object(const char *path) {
    char error[ERROR_TEXT_SIZE];
    struct value unused;
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        return NULL;
    }
    FILE *file = files_open(path, NULL, error, sizeof error);
    if (file == NULL) {
        error_user("%s", error);
    }
    char *text = calloc(TEXT_MAX + 1, 1);
    CHECK(text != NULL);
    size_t got = fread(text, 1, TEXT_MAX, file);
    fclose(file);
    const char *begin = skip_blanks(text);
    const char *end = object_find(begin, "", &unused);
    if (end == NULL || skip_blanks(end) != text + got || got == TEXT_MAX) {
        error_user("%s: is not a JSON object of less than %d bytes; expected the config.json of a "
                   "model that --save or transformers wrote",
                   path, TEXT_MAX);
    }
    memmove(text, begin, strlen(begin) + 1);
    return text;
}

// Positions that are scaled for long texts make another model of the same weights.
static void refuse_scaling(const char *path, const char *theirs) {
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        struct value v = member(theirs, keys[i]);
        if (v.text == NULL) {
            continue;
        }
        struct value type = {0};
        if (v.text[0] == '{') {
            type = member(v.text, "rope_type");
            type = type.text != NULL ? type : member(v.text, "type");
        }
        bool absent = type.text == NULL && strcmp(keys[i], "rope_parameters") == 0;
        if (!absent && !is_text(type, "\"default\"")) {
            error_user("%s: %s is %.*s there; this program has no scaled positions, so the weights "
                       "would make another model",
                       path, keys[i], shown(v), v.text);
        }
    }
}

static void refuse(const char *path, const char *key, const char *flag, struct value our,
                   struct value their) {
    if (strcmp(key, "model_type") == 0) {
        error_user("%s: is of the model %.*s, and this program is %.*s; name a checkpoint of the "
                   "same model",
                   path, shown(their), their.text, shown(our), our.text);
    }
    if (flag == NULL) {
        error_user("%s: %s is %.*s there; this program has only %.*s, with which the weights would "
                   "make another model",
                   path, key, shown(their), their.text, shown(our), our.text);
    }
    error_user("%s: %s is %.*s there and %.*s in this run; give %s %.*s", path, key, shown(their),
               their.text, shown(our), our.text, flag, shown(their), their.text);
}

static void compare(const char *path, const char *ours, const char *theirs) {
    static const struct {
        const char *key;
        const char *flag; // that sets it, or NULL
    } FACTS[] = {
        {"model_type", NULL},
        {"num_attention_heads", "--heads"},
        {"num_key_value_heads", "--kv-heads"},
        {"rms_norm_eps", "--norm-eps"},
        {"rope_theta", "--rope-theta"},
        {"hidden_act", NULL},
        {"attention_bias", NULL},
        {"mlp_bias", NULL},
        {"tie_word_embeddings", NULL},
    };
    struct value positions = member(theirs, "rope_parameters"); // newer versions put them there
    for (size_t i = 0; i < sizeof FACTS / sizeof FACTS[0]; i++) {
        struct value our = member(ours, FACTS[i].key), their = member(theirs, FACTS[i].key);
        if (their.text == NULL && positions.text != NULL && positions.text[0] == '{') {
            their = member(positions.text, FACTS[i].key);
        }
        if (our.text != NULL && their.text != NULL && !same(our, their)) {
            refuse(path, FACTS[i].key, FACTS[i].flag, our, their);
        }
    }
}

void config_check(const struct model *m, const char *dir, bool warn) {
    char path[FILES_PATH_SIZE], ours[OURS_MAX] = "";
    if (snprintf(path, sizeof path, "%s/config.json", dir) >= FILES_PATH_SIZE) {
        error_user("%.80s ...: the path is too long", dir);
    }
    char *theirs = read_object(path);
    if (theirs == NULL) {
        if (warn) {
            error_warning("%s: there is no such file, so nothing tells whether the weights belong "
                          "to this model with these sizes",
                          path);
        }
        return;
    }
    FILE *file = fmemopen(ours, sizeof ours - 1, "w");
    CHECK(file != NULL);
    model_write_config(m, file);
    CHECK(fclose(file) == 0);
    refuse_scaling(path, theirs);
    compare(path, ours, theirs);
    free(theirs);
}
