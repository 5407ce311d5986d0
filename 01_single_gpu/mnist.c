// The convolutional network of PyTorch's MNIST example, cut into four units.
//
//   unit 0   image -> conv1 1→32, 3×3
//   unit 1   ReLU -> conv2 32→64, 3×3 -> max-pool 2×2
//   unit 2   ReLU -> dropout -> fc1 9216→128
//   unit 3   ReLU -> dropout -> fc2 128→10 -> loss
//
// A ReLU stands at the start of the unit that uses its result: there it works in place, and the
// unit's saved input is all that its backward needs. Max-pool and ReLU may change places, because
// max(relu(a), relu(b)) = relu(max(a, b)); pooling first leaves a quarter of the work.
//
// The parameters have torch's names and shapes. Sources: pytorch/examples, mnist/main.py.
#include "common/error.h"
#include "common/model.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    UNITS = 4,
    CLASSES = 10,
    SIDE = 28, // pixels of an image's side
    POOLED = (SIDE - 4) / 2, // 12
    CHANNELS1 = 32,
    CHANNELS2 = 64,
    FEATURES = CHANNELS2 * POOLED * POOLED, // 9216
    HIDDEN = 128,
};

static const struct conv CONV1 = {
    .in_channels = 1,
    .out_channels = CHANNELS1,
    .height = SIDE,
    .width = SIDE,
    .kernel = 3,
};

static const struct conv CONV2 = {
    .in_channels = CHANNELS1,
    .out_channels = CHANNELS2,
    .height = SIDE - 2,
    .width = SIDE - 2,
    .kernel = 3,
};

struct model {
    double dropout;
    struct options *options;
    struct arg args[4];
};

// What a unit saves besides its input.
enum {
    WINNER, // unit 1: (B, FEATURES) U8
};

enum {
    DROPPED, // units 2 and 3: the input after ReLU and dropout
    LOGITS, // unit 3: (B, CLASSES)
    ROW_MAX, // unit 3: (B, 1)
    ROW_SUM, // unit 3: (B, 1)
};

// The parameters of every unit.
enum {
    WEIGHT,
    BIAS,
};

// ---- set-up ------------------------------------------------------------------------------------

struct model *model_create(struct options *o) {
    struct model *m = calloc(1, sizeof *m);
    CHECK(m != NULL);
    m->dropout = 0.5;
    m->options = o;
    o->optimizer = "adadelta";
    o->schedule = "step";
    o->gamma = 0.7;
    o->lr = 1;
    o->min_lr = 0;
    o->batch = 64;
    o->epochs = 5;
    o->eval_every = -1; // once an epoch
    o->eval_batch = 64;
    return m;
}

const struct arg *model_args(struct model *m) {
    const struct arg args[] = {
        {"--dropout", ARG_DOUBLE, &m->dropout, 0, 0.99, .group = "Model",
         .help = "share that is dropped before fc2; half of it before fc1"},
        {0},
    };
    memcpy(m->args, args, sizeof args);
    return m->args;
}

void model_init(struct model *m, struct comm tp) {
    (void)m;
    (void)tp;
}

void model_free(struct model *m) {
    free(m);
}

const char *model_name(const struct model *m) {
    (void)m;
    return "mnist";
}

const char *model_item(const struct model *m) {
    (void)m;
    return "images";
}

void model_describe(const struct model *m, char *text, size_t size) {
    snprintf(text, size, "conv %d, conv %d, pool, fc %d, fc %d, dropout %g", CHANNELS1, CHANNELS2,
             HIDDEN, CLASSES, m->dropout);
}

void model_write_config(const struct model *m, FILE *file) {
    fprintf(file,
            "{\n"
            "  \"architectures\": [\"Net\"],\n"
            "  \"dropout\": %.9g,\n"
            "  \"model_type\": \"mnist\"\n"
            "}\n",
            m->dropout);
}

struct data *model_data(const struct model *m) {
    return data_open_images(m->options->data, m->options->seed);
}

// ---- units -------------------------------------------------------------------------------------

int model_units(const struct model *m) {
    (void)m;
    return UNITS;
}

static void conv_params(const char *name, struct conv c, struct param *out) {
    out[WEIGHT] = (struct param){
        .rows = c.out_channels,
        .cols = c.in_channels * c.kernel * c.kernel,
        .shape = {c.out_channels, c.in_channels, c.kernel, c.kernel},
        .dims = 4,
        .decay = true,
    };
    out[BIAS] = (struct param){
        .rows = c.out_channels,
        .cols = 1,
    };
    snprintf(out[WEIGHT].name, PARAM_NAME_MAX, "%s.weight", name);
    snprintf(out[BIAS].name, PARAM_NAME_MAX, "%s.bias", name);
}

static void linear_params(const char *name, size_t in, size_t out_features, struct param *out) {
    out[WEIGHT] = (struct param){
        .rows = out_features,
        .cols = in,
        .decay = true,
    };
    out[BIAS] = (struct param){
        .rows = out_features,
        .cols = 1,
    };
    snprintf(out[WEIGHT].name, PARAM_NAME_MAX, "%s.weight", name);
    snprintf(out[BIAS].name, PARAM_NAME_MAX, "%s.bias", name);
}

int unit_params(const struct model *m, int u, struct param *out) {
    (void)m;
    switch (u) {
    case 0:
        conv_params("conv1", CONV1, out);
        break;
    case 1:
        conv_params("conv2", CONV2, out);
        break;
    case 2:
        linear_params("fc1", FEATURES, HIDDEN, out);
        break;
    default:
        linear_params("fc2", HIDDEN, CLASSES, out);
        break;
    }
    params_layout(out, 2);
    return 2;
}

// torch's default: weights and biases uniform in ±1/sqrt(inputs of an output).
void unit_init(const struct model *m, int u, struct tensor params) {
    struct param p[UNIT_PARAMS_MAX];
    int count = unit_params(m, u, p);
    float bound = 1 / sqrtf(p[WEIGHT].place.whole_cols);
    ops_zero(params);
    for (int i = 0; i < count; i++) {
        struct random_key key = {
            .seed = m->options->seed,
            .purpose = RANDOM_INIT,
            .id = u * UNIT_PARAMS_MAX + i,
        };
        ops_random_uniform(param_view(params, &p[i]), key, p[i].place, bound);
    }
}

struct tensor unit_output(const struct model *m, int u, const struct batch *b) {
    (void)m;
    static const size_t cols[UNITS] = {
        (SIDE - 2) * (SIDE - 2) * CHANNELS1,
        FEATURES,
        HIDDEN,
        0,
    };
    return (struct tensor){
        .rows = u == UNITS - 1 ? 0 : b->samples,
        .cols = cols[u],
    };
}

static struct tensor activation(size_t rows, size_t cols) {
    return tensor_alloc(rows, cols, DTYPE_F32, MEM_ACTIVATIONS);
}

static struct tensor weight(const struct model *m, int u, struct tensor flat) {
    struct param p[UNIT_PARAMS_MAX];
    unit_params(m, u, p);
    return param_view(flat, &p[WEIGHT]);
}

static struct tensor bias(const struct model *m, int u, struct tensor flat) {
    struct param p[UNIT_PARAMS_MAX];
    unit_params(m, u, p);
    return param_view(flat, &p[BIAS]);
}

// y = x with dropout, the same mask in forward and backward. y may be x.
static void dropout(const struct model *m, int u, const struct batch *b, struct tensor y,
                    struct tensor x) {
    struct random_key key = {
        .seed = m->options->seed,
        .purpose = RANDOM_DROPOUT,
        .id = u,
    };
    struct place place = {
        .first_row = b->first_sample,
        .whole_rows = SIZE_MAX,
        .whole_cols = x.cols,
    };
    float p = u == 2 ? m->dropout / 2 : m->dropout;
    ops_dropout(y, x, b->train ? p : 0, key, place);
}

static struct tensor conv1_forward(const struct model *m, struct tensor params,
                                   const struct batch *b) {
    struct tensor y = activation(b->samples, unit_output(m, 0, b).cols);
    ops_conv2d(y, b->input, weight(m, 0, params), bias(m, 0, params), CONV1);
    return y;
}

static void conv1_backward(const struct model *m, struct tensor dy, const struct batch *b,
                           struct tensor grads) {
    ops_conv2d_dw(weight(m, 0, grads), bias(m, 0, grads), dy, b->input, CONV1);
}

static struct tensor conv2_forward(const struct model *m, struct tensor params, struct tensor x,
                                   struct tensor *t) {
    ops_relu(x);
    size_t height = CONV2.height - CONV2.kernel + 1;
    size_t width = CONV2.width - CONV2.kernel + 1;
    struct tensor z = activation(x.rows, height * width * CHANNELS2);
    ops_conv2d(z, x, weight(m, 1, params), bias(m, 1, params), CONV2);
    struct tensor y = activation(x.rows, FEATURES);
    t[WINNER] = tensor_alloc(x.rows, FEATURES, DTYPE_U8, MEM_ACTIVATIONS);
    ops_max_pool(y, t[WINNER], z, CHANNELS2, height, width);
    tensor_free(&z);
    return y;
}

static struct tensor conv2_backward(const struct model *m, struct tensor params,
                                    const struct saved *saved, struct tensor dy,
                                    struct tensor grads) {
    size_t height = CONV2.height - CONV2.kernel + 1;
    size_t width = CONV2.width - CONV2.kernel + 1;
    struct tensor dz = activation(dy.rows, height * width * CHANNELS2);
    ops_max_pool_backward(dz, dy, saved->t[WINNER], CHANNELS2, height, width);
    ops_conv2d_dw(weight(m, 1, grads), bias(m, 1, grads), dz, saved->x, CONV2);
    struct tensor dx = tensor_like(saved->x);
    ops_conv2d_dx(dx, dz, weight(m, 1, params), CONV2);
    ops_relu_backward(dx, saved->x);
    tensor_free(&dz);
    return dx;
}

// Units 2 and 3: ReLU, dropout, linear layer.
static struct tensor fc_forward(const struct model *m, int u, struct tensor params, struct tensor x,
                                const struct batch *b, struct tensor *t) {
    ops_relu(x);
    t[DROPPED] = tensor_like(x);
    dropout(m, u, b, t[DROPPED], x);
    struct tensor w = weight(m, u, params);
    struct tensor y = activation(x.rows, w.rows);
    ops_linear(y, t[DROPPED], w, bias(m, u, params));
    return y;
}

static struct tensor fc_backward(const struct model *m, int u, struct tensor params,
                                 const struct saved *saved, struct tensor dy, const struct batch *b,
                                 struct tensor grads) {
    ops_linear_dw(weight(m, u, grads), bias(m, u, grads), dy, saved->t[DROPPED]);
    struct tensor dx = tensor_like(saved->x);
    ops_linear_dx(dx, dy, weight(m, u, params), false);
    dropout(m, u, b, dx, dx);
    ops_relu_backward(dx, saved->x);
    return dx;
}

// Stores the sum of the cross entropies, and how many images were recognised.
static void cross_entropy(const struct batch *b, struct tensor *t) {
    t[ROW_MAX] = activation(t[LOGITS].rows, 1);
    t[ROW_SUM] = activation(t[LOGITS].rows, 1);
    struct tensor target_logit = activation(t[LOGITS].rows, 1);
    ops_row_max(t[ROW_MAX], t[LOGITS], 0, CLASSES);
    ops_row_exp_sum(t[ROW_SUM], target_logit, t[LOGITS], t[ROW_MAX], b->targets, 0, CLASSES);
    ops_cross_entropy(b->loss, t[ROW_SUM], target_logit, b->targets);
    tensor_free(&target_logit);
}

struct tensor unit_logits(const struct model *m, const struct saved *saved) {
    (void)m;
    return saved->t[LOGITS];
}

struct tensor unit_forward(const struct model *m, int u, struct tensor params, struct tensor x,
                           const struct batch *b, struct saved *saved) {
    struct tensor y = {0};
    saved->x = x;
    if (u == 0) {
        y = conv1_forward(m, params, b);
    } else if (u == 1) {
        y = conv2_forward(m, params, x, saved->t);
    } else if (u == 2) {
        y = fc_forward(m, u, params, x, b, saved->t);
    } else {
        saved->t[LOGITS] = fc_forward(m, u, params, x, b, saved->t);
        cross_entropy(b, saved->t);
    }
    return y;
}

struct tensor unit_backward(const struct model *m, int u, struct tensor params, struct saved *saved,
                            struct tensor dy, const struct batch *b, struct tensor grads) {
    struct tensor dx = {0};
    if (u == 0) {
        conv1_backward(m, dy, b, grads);
    } else if (u == 1) {
        dx = conv2_backward(m, params, saved, dy, grads);
    } else if (u == 2) {
        dx = fc_backward(m, u, params, saved, dy, b, grads);
    } else {
        const struct tensor *t = saved->t;
        ops_cross_entropy_backward(t[LOGITS], t[ROW_MAX], t[ROW_SUM], b->targets, 0, CLASSES,
                                   b->scale); // logits become their gradients
        dx = fc_backward(m, u, params, saved, t[LOGITS], b, grads);
    }
    padding_zero(m, u, grads);
    tensor_free(&dy);
    saved_free(saved);
    return dx;
}
