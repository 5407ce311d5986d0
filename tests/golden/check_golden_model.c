// Compares one model with golden files: what other people's code computed in float64.
//
// Linked with llama.c or mnist.c of a chapter; check_golden chooses between the two programs.
// A file holds parameters, inputs of a few training steps, and what came out: losses, grad norms,
// gradients of the first step, parameters after the last. make_golden.py documents the format.
// For each file one line is printed: the largest relative error of each kind, tensors by norm.
#include "common/device.h"
#include "common/error.h"
#include "common/model.h"
#include "common/optimizer.h"
#include "common/options.h"
#include "common/safetensors.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ERROR_SIZE = 512 };

// Bounds of the largest relative errors.
static const double LOSS_BOUND = 5e-6;
static const double NORM_BOUND = 1e-5;
static const double GRAD_BOUND = 1e-5;
static const double FINAL_BOUND = 5e-5;

struct errors {
    double loss;
    double norm;
    double grad;
    double final;
};

struct golden {
    const char *path;
    struct safetensors *file;
    struct options options;
    struct model *model;
    bool samples; // the file keeps every n-th element of a tensor, and its norm
    int units;
    struct tensor *params; // (units)
    struct tensor *grads; // (units)
    struct tensor *states[OPTIMIZER_STATES_MAX];
    struct piece pieces[64 * UNIT_PARAMS_MAX];
    size_t piece_count;
    struct tensor loss;
};

static double largest(double a, double b) {
    return !(b <= a) ? b : a; // a NaN is the largest
}

static double relative(double a, double b) {
    return fabs(a - b) / fabs(b);
}

static const char *fact(const struct golden *g, const char *key) {
    const char *value = safetensors_metadata(g->file, key);
    if (value == NULL) {
        error_user("%s: no \"%s\" in its metadata; expected a file of make_golden.py", g->path,
                   key);
    }
    return value;
}

// A whole tensor of the file in host memory; free() it.
static void *read_tensor(const struct golden *g, const char *name,
                         const struct safetensors_entry **out) {
    char error[ERROR_SIZE];
    const struct safetensors_entry *e = safetensors_find(g->file, name);
    if (e == NULL) {
        error_user("%s: no tensor %s; expected a file of make_golden.py", g->path, name);
    }
    void *data = malloc(e->bytes + 1);
    CHECK(data != NULL);
    if (!safetensors_read(g->file, e, 0, e->count, data, error, sizeof error)) {
        error_user("%s", error);
    }
    *out = e;
    return data;
}

// ---- set-up ------------------------------------------------------------------------------------

static void parse(struct golden *g) {
    static const char *const llama[][2] = {
        {"--vocab", "vocab_size"},
        {"--dim", "hidden_size"},
        {"--layers", "num_hidden_layers"},
        {"--heads", "num_attention_heads"},
        {"--kv-heads", "num_key_value_heads"},
        {"--hidden", "intermediate_size"},
        {"--norm-eps", "rms_norm_eps"},
        {"--rope-theta", "rope_theta"},
        {"--beta1", "beta1"},
        {"--beta2", "beta2"},
        {"--weight-decay", "weight_decay"},
        {"--clip", "grad_clip"},
    };
    static const char *const mnist[][2] = {
        {"--dropout", "dropout"},
        {"--rho", "rho"},
    };
    char *argv[64] = {"check_golden"};
    int argc = 1;
    const char *const(*map)[2] = g->samples ? mnist : llama;
    size_t count = g->samples ? sizeof mnist / sizeof mnist[0] : sizeof llama / sizeof llama[0];
    for (size_t i = 0; i < count; i++) {
        argv[argc++] = (char *)map[i][0];
        argv[argc++] = (char *)fact(g, map[i][1]);
    }
    const char *const both[][2] = {
        {"--optimizer", "optimizer"},
        {"--lr", "lr"},
        {"--eps", "eps"},
    };
    for (size_t i = 0; i < sizeof both / sizeof both[0]; i++) {
        argv[argc++] = (char *)both[i][0];
        argv[argc++] = (char *)fact(g, both[i][1]);
    }
    char seq[32];
    if (!g->samples) {
        const struct safetensors_entry *tokens = safetensors_find(g->file, "tokens");
        CHECK(tokens != NULL && tokens->dims == 3);
        snprintf(seq, sizeof seq, "%zu", tokens->shape[2] - 1);
        argv[argc++] = "--seq";
        argv[argc++] = seq;
    }
    const struct arg none[] = {{0}};
    options_parse(&g->options, argc, argv, "", model_args(g->model), none);
}

static void piece_add(struct golden *g, int u, const struct param *p) {
    CHECK(g->piece_count < sizeof g->pieces / sizeof g->pieces[0]);
    struct piece *piece = &g->pieces[g->piece_count++];
    piece->param = param_view(g->params[u], p);
    piece->grad = param_view(g->grads[u], p);
    for (int k = 0; k < optimizer_states(&g->options); k++) {
        piece->state[k] = param_view(g->states[k][u], p);
    }
    piece->decay = p->decay;
}

// Start values: from the file, or by the formula that make_golden.py documents.
static void start_values(struct golden *g, const struct param *p, int number, int fan_in,
                         struct tensor values) {
    size_t count = tensor_count(values);
    float *host = malloc(count * sizeof *host);
    CHECK(host != NULL);
    if (g->samples) {
        for (size_t i = 0; i < count; i++) {
            host[i] = (float)(sin(0.37 * (double)(i + 1) + 0.11 * number) / sqrt(fan_in));
        }
    } else {
        char name[PARAM_NAME_MAX + 16];
        const struct safetensors_entry *e;
        snprintf(name, sizeof name, "param/%.79s", p->name);
        float *file = read_tensor(g, name, &e);
        CHECK(e->count == count && e->dtype == DTYPE_F32);
        memcpy(host, file, count * sizeof *host);
        free(file);
    }
    device_upload(values, host);
    free(host);
}

static void golden_init(struct golden *g) {
    g->units = model_units(g->model);
    struct tensor **buffers[] = {&g->params, &g->grads, &g->states[0], &g->states[1]};
    for (int k = 0; k < 4; k++) {
        *buffers[k] = calloc((size_t)g->units, sizeof **buffers[k]);
        CHECK(*buffers[k] != NULL);
    }
    int number = 0;
    for (int u = 0; u < g->units; u++) {
        struct param p[UNIT_PARAMS_MAX];
        int count = unit_params(g->model, u, p);
        for (int k = 0; k < 4; k++) {
            (*buffers[k])[u] = tensor_alloc(unit_size(g->model, u), 1, DTYPE_F32, MEM_PARAMS);
            ops_zero((*buffers[k])[u]);
        }
        for (int i = 0; i < count; i++) {
            int fan_in = (int)p[0].place.whole_cols;
            start_values(g, &p[i], number++, fan_in, param_view(g->params[u], &p[i]));
            piece_add(g, u, &p[i]);
        }
    }
    g->loss = tensor_alloc(1, 2, DTYPE_F64, MEM_ACTIVATIONS);
}

// ---- a step ------------------------------------------------------------------------------------

static struct batch batch_tokens(const struct golden *g, size_t step) {
    const struct safetensors_entry *e;
    int32_t *tokens = read_tensor(g, "tokens", &e);
    size_t B = e->shape[1];
    size_t T = e->shape[2] - 1;
    struct batch b = {.samples = B};
    b.input = tensor_alloc(B, T, DTYPE_I32, MEM_ACTIVATIONS);
    b.targets = tensor_alloc(B, T, DTYPE_I32, MEM_ACTIVATIONS);
    for (size_t i = 0; i < B; i++) {
        const int32_t *row = tokens + (step * B + i) * (T + 1);
        device_upload(tensor_view(b.input, i * T, 1, T), row);
        device_upload(tensor_view(b.targets, i * T, 1, T), row + 1);
    }
    free(tokens);
    return b;
}

static struct batch batch_images(const struct golden *g, size_t step) {
    const struct safetensors_entry *images_entry;
    const struct safetensors_entry *e;
    float *images = read_tensor(g, "images", &images_entry);
    int32_t *labels = read_tensor(g, "labels", &e);
    size_t B = e->shape[1];
    size_t pixels = images_entry->count / e->count;
    struct batch b = {.samples = B};
    b.input = tensor_alloc(B, pixels, DTYPE_F32, MEM_ACTIVATIONS);
    b.targets = tensor_alloc(B, 1, DTYPE_I32, MEM_ACTIVATIONS);
    device_upload(b.input, images + step * B * pixels);
    device_upload(b.targets, labels + step * B);
    free(labels);
    free(images);
    return b;
}

static double forward_backward(struct golden *g, struct batch *b) {
    struct saved *saved = calloc((size_t)g->units, sizeof *saved);
    CHECK(saved != NULL);
    size_t targets = tensor_count(b->targets);
    b->scale = 1.0f / (float)targets;
    b->train = true;
    b->loss = g->loss;
    struct tensor x = {0};
    for (int u = 0; u < g->units; u++) {
        x = unit_forward(g->model, u, g->params[u], x, b, &saved[u]);
    }
    for (int u = g->units - 1; u >= 0; u--) {
        x = unit_backward(g->model, u, g->params[u], &saved[u], x, b, g->grads[u]);
    }
    free(saved);
    double loss[2];
    device_download(loss, g->loss);
    return loss[0] / (double)targets;
}

// ---- comparison --------------------------------------------------------------------------------

// Relative error, by norm, of the elements that the file has.
static double tensor_error(const struct golden *g, const char *kind, const struct param *p,
                           struct tensor values) {
    char name[PARAM_NAME_MAX + 32];
    const struct safetensors_entry *e;
    snprintf(name, sizeof name, g->samples ? "%s_sample/%s" : "%s/%s", kind, p->name);
    float *right = read_tensor(g, name, &e);
    size_t count = tensor_count(values);
    size_t stride = g->samples ? (count + 256) / 257 : 1;
    CHECK(e->count == (count + stride - 1) / stride);
    float *ours = malloc(count * sizeof *ours);
    CHECK(ours != NULL);
    device_download(ours, values);
    double difference = 0;
    double size = 0;
    for (size_t i = 0; i < e->count; i++) {
        difference += pow((double)ours[i * stride] - right[i], 2);
        size += pow(right[i], 2);
    }
    free(right);
    free(ours);
    return sqrt(difference / size);
}

// Relative error of the norm of a whole gradient, for files that keep a sample of it.
static double norm_error(const struct golden *g, const struct param *p, struct tensor grad) {
    char name[PARAM_NAME_MAX + 32];
    const struct safetensors_entry *e;
    snprintf(name, sizeof name, "grad_norm/%.79s", p->name);
    double *right = read_tensor(g, name, &e);
    float *ours = malloc(tensor_count(grad) * sizeof *ours);
    CHECK(ours != NULL);
    device_download(ours, grad);
    double sum = 0;
    for (size_t i = 0; i < tensor_count(grad); i++) {
        sum += (double)ours[i] * ours[i];
    }
    double error = relative(sqrt(sum), *right);
    free(ours);
    free(right);
    return error;
}

static void compare_all(struct golden *g, const char *kind, struct tensor *flat, double *worst) {
    for (int u = 0; u < g->units; u++) {
        struct param p[UNIT_PARAMS_MAX];
        int count = unit_params(g->model, u, p);
        for (int i = 0; i < count; i++) {
            struct tensor values = param_view(flat[u], &p[i]);
            *worst = largest(*worst, tensor_error(g, kind, &p[i], values));
            if (g->samples && strcmp(kind, "grad") == 0) {
                *worst = largest(*worst, norm_error(g, &p[i], values));
            }
        }
    }
}

static struct errors steps(struct golden *g) {
    const struct safetensors_entry *e;
    double *losses = read_tensor(g, "losses", &e);
    double *norms = read_tensor(g, "grad_norms", &e);
    struct errors worst = {0};
    double lr = g->options.lr;
    for (size_t step = 0; step < e->count; step++) {
        if (g->samples && step == strtoul(fact(g, "scheduler_step_after"), NULL, 10)) {
            lr *= strtod(fact(g, "gamma"), NULL);
        }
        struct batch b = g->samples ? batch_images(g, step) : batch_tokens(g, step);
        double loss = forward_backward(g, &b);
        batch_free(&b);
        uint32_t max_bits = norm_max(g->pieces, g->piece_count);
        double norm = norm_root(norm_squares(g->pieces, g->piece_count, max_bits), max_bits);
        worst.loss = largest(worst.loss, relative(loss, losses[step]));
        worst.norm = largest(worst.norm, relative(norm, norms[step]));
        if (step == 0) {
            compare_all(g, "grad", g->grads, &worst.grad);
        }
        optimizer_step(&g->options, g->pieces, g->piece_count, lr,
                       clip_scale(norm, g->options.clip), (int64_t)step);
    }
    compare_all(g, "final", g->params, &worst.final);
    free(losses);
    free(norms);
    return worst;
}

static void golden_free(struct golden *g) {
    struct tensor *buffers[] = {g->params, g->grads, g->states[0], g->states[1]};
    for (int k = 0; k < 4; k++) {
        for (int u = 0; u < g->units; u++) {
            tensor_free(&buffers[k][u]);
        }
        free(buffers[k]);
    }
    tensor_free(&g->loss);
    model_free(g->model);
    safetensors_close(g->file);
}

static bool check(const char *path) {
    static struct golden g;
    char error[ERROR_SIZE];
    memset(&g, 0, sizeof g);
    g.path = path;
    g.file = safetensors_open(path, error, sizeof error);
    if (g.file == NULL) {
        error_user("%s", error);
    }
    g.options = options_defaults();
    g.model = model_create(&g.options);
    g.samples = strcmp(fact(&g, "model"), "mnist") == 0;
    parse(&g);
    model_init(g.model, comm_self());
    golden_init(&g);
    struct errors e = steps(&g);
    bool pass = e.loss <= LOSS_BOUND && e.norm <= NORM_BOUND && e.grad <= GRAD_BOUND &&
                e.final <= FINAL_BOUND;
    const char *slash = strrchr(path, '/');
    printf("%s %-24s loss %.1e  grad norm %.1e  gradients %.1e  final %.1e\n",
           pass ? "PASS" : "FAIL", slash != NULL ? slash + 1 : path, e.loss, e.norm, e.grad,
           e.final);
    golden_free(&g);
    return pass;
}

int main(int argc, char **argv) {
    device_init(0, 1);
    bool pass = argc > 1;
    for (int i = 1; i < argc; i++) {
        pass = check(argv[i]) && pass;
    }
    return pass ? 0 : 1;
}
