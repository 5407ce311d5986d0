// config.json of a checkpoint's folder: what the shapes of the tensors do not tell.
#ifndef SHARD_CONFIG_H
#define SHARD_CONFIG_H

#include "model.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * @brief Ends with error_user() if the config.json in @p dir tells of another model than @p m, of
 * which the same weights would make another function: other heads, angles or activations.
 *
 * Local. What it does not mention is taken to be as here. A file that is not JSON is the user's
 * mistake; where there is none, nothing can be said.
 * @param warn whether to print a warning where there is none
 * Source: transformers, configuration_llama.py, for names and meanings.
 */
void config_check(const struct model *m, const char *dir, bool warn);

#ifdef __cplusplus
}
#endif
#endif
