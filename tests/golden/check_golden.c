// check_golden FILE…: compares golden files with the models of this build.
//
// A file's metadata names its model; check_golden_llama and check_golden_mnist, which lie beside
// this program, do the work. Exit code 0 if all files pass.
#include "common/error.h"
#include "common/safetensors.h"
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// Runs the program of the file's model; false if it failed.
static bool check(const char *dir, const char *path) {
    char error[512], program[4096];
    struct safetensors *file = safetensors_open(path, error, sizeof error);
    if (file == NULL) {
        error_user("%s", error);
    }
    const char *model = safetensors_metadata(file, "model");
    if (model == NULL || (strcmp(model, "llama") != 0 && strcmp(model, "mnist") != 0)) {
        error_user("%s: its metadata names the model %s; expected llama or mnist", path,
                   model != NULL ? model : "(none)");
    }
    CHECK(snprintf(program, sizeof program, "%s/check_golden_%s", dir, model) <
          (int)sizeof program);
    safetensors_close(file);
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        execl(program, program, path, (char *)NULL);
        fprintf(stderr, "check_golden: cannot run %s; build it first\n", program);
        _exit(127);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status == 0;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        error_user("no files given; usage: check_golden FILE…");
    }
    char *self = strdup(argv[0]);
    CHECK(self != NULL);
    const char *dir = dirname(self);
    bool pass = true;
    for (int i = 1; i < argc; i++) {
        pass = check(dir, argv[i]) && pass;
    }
    free(self);
    return pass ? 0 : 1;
}
