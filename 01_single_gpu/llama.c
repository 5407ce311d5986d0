// A Llama 2 transformer, cut into units: embedding, blocks, head.
//
//   unit 0       the embedding:  y = E[token]
//   unit 1 … L   the blocks:     x2 = x + attention(norm(x))
//                                y = x2 + mlp(norm(x2))
//   unit L+1     the head:       logits = W norm(x), and their loss
//
// The arithmetic is that of Hugging Face's LlamaForCausalLM, and so are the parameters' names:
// RMSNorm, rotary positions in the rotate-half form, causal attention with grouped key and value
// heads, SwiGLU, untied head, no biases.
//
// Sources: Touvron et al., "Llama 2", 2023; transformers, modeling_llama.py.
#include "common/error.h"
#include "common/model.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Dimensions:
//   B  samples of the micro-batch      H  query heads
//   T  positions of a sample           G  key and value heads
//   C  width of the model              D  width of a head: C / H
//   V  vocabulary                      F  width inside the MLP
struct model {
    const char *size; // tiny, small, medium
    int64_t vocab; // V
    int64_t dim; // C
    int64_t layers; // L
    int64_t heads; // H
    int64_t kv_heads; // G
    int64_t hidden; // F
    int64_t seq; // T
    double norm_eps;
    double rope_theta;
    double dropout;
    struct options *options;
    struct tensor rope; // (T, D) table of angles
    struct arg args[16];
};

// What a unit saves besides its input.
enum {
    NORM1, // (B*T, C)
    Q, // (B*T, H*D) rotated
    K, // (B*T, G*D) rotated
    VALUE, // (B*T, G*D)
    ATTENTION, // (B*T, H*D)
    LSE, // (B*T, H) log of the sum of exp(scores): backward makes the softmax from it
    X2, // (B*T, C) after attention
    NORM2, // (B*T, C)
    GATE, // (B*T, F)
    UP, // (B*T, F)
    MIXED, // (B*T, F) silu(gate) * up
};

enum {
    HEAD_NORM, // (B*T, C)
    LOGITS, // (B*T, V)
    ROW_MAX, // (B*T, 1)
    ROW_SUM, // (B*T, 1)
};

// The parameters of a unit, in the order of unit_params().
enum {
    EMBEDDING,
};

enum {
    NORM1_W,
    Q_W,
    K_W,
    VALUE_W,
    O_W,
    NORM2_W,
    GATE_W,
    UP_W,
    DOWN_W,
};

enum {
    HEAD_NORM_W,
    HEAD_W,
};

// ---- set-up ------------------------------------------------------------------------------------

struct size {
    const char *name;
    int64_t vocab;
    int64_t dim;
    int64_t layers;
    int64_t heads;
    int64_t kv_heads;
    int64_t hidden;
    int64_t seq;
    int64_t batch;
};

static const struct size SIZES[] = {
    {
        .name = "tiny",
        .vocab = 256,
        .dim = 128,
        .layers = 4,
        .heads = 4,
        .kv_heads = 2,
        .hidden = 352,
        .seq = 128,
        .batch = 8,
    },
    {
        .name = "small",
        .vocab = 256,
        .dim = 288,
        .layers = 6,
        .heads = 6,
        .kv_heads = 6,
        .hidden = 768,
        .seq = 256,
        .batch = 8,
    },
    {
        .name = "medium",
        .vocab = 256,
        .dim = 768,
        .layers = 12,
        .heads = 12,
        .kv_heads = 12,
        .hidden = 2048,
        .seq = 512,
        .batch = 4,
    },
};

struct model *model_create(struct options *o) {
    struct model *m = calloc(1, sizeof *m);
    CHECK(m != NULL);
    m->size = "tiny";
    m->norm_eps = 1e-5;
    m->rope_theta = 10000;
    m->options = o;
    o->optimizer = "adamw";
    o->schedule = "cosine";
    o->lr = 2e-3;
    o->min_lr = -1; // a tenth of lr
    o->warmup = 100;
    o->weight_decay = 0.1;
    o->clip = 1;
    o->steps = 6000;
    o->eval_batch = 8;
    return m;
}

const struct arg *model_args(struct model *m) {
    const struct arg args[] = {
        {"--size", ARG_CHOICE, &m->size, .choices = "tiny|small|medium", .group = "Model",
         .help = "sizes and batch, each of which has a flag too"},
        {"--vocab", ARG_INT, &m->vocab, 1, 1 << 20, .absent = "by --size",
         .help = "size of the vocabulary"},
        {"--dim", ARG_INT, &m->dim, 1, 1 << 20, .absent = "by --size",
         .help = "width of the model"},
        {"--layers", ARG_INT, &m->layers, 1, 1000, .absent = "by --size",
         .help = "number of blocks"},
        {"--heads", ARG_INT, &m->heads, 1, 4096, .absent = "by --size",
         .help = "query heads of a block"},
        {"--kv-heads", ARG_INT, &m->kv_heads, 1, 4096, .absent = "by --size",
         .help = "key and value heads of a block"},
        {"--hidden", ARG_INT, &m->hidden, 1, 1 << 20, .absent = "by --size",
         .help = "width inside the MLP"},
        {"--seq", ARG_INT, &m->seq, 1, 1 << 20, .absent = "by --size",
         .help = "positions of a sample"},
        {"--norm-eps", ARG_DOUBLE, &m->norm_eps, 0, 1, .help = "epsilon of RMSNorm"},
        {"--rope-theta", ARG_DOUBLE, &m->rope_theta, 1, 1e9, .help = "base of the rotary angles"},
        {"--dropout", ARG_DOUBLE, &m->dropout, 0, 0.99,
         .help = "share that is dropped after attention and MLP"},
        {"--sample", ARG_INT, &m->options->sample, 0, 1 << 20, .unit = "N",
         .help = "let the trained model write N bytes of text"},
        {"--temperature", ARG_DOUBLE, &m->options->temperature, 0, 100,
         .help = "chance in that text; 0: always the likeliest byte"},
        {0},
    };
    memcpy(m->args, args, sizeof args);
    return m->args;
}

static void size_default(int64_t *field, int64_t value) {
    if (*field == 0) {
        *field = value;
    }
}

// Fields that no flag set come from --size.
static void sizes_fill(struct model *m) {
    const struct size *s = SIZES;
    while (strcmp(s->name, m->size) != 0) {
        s++;
    }
    size_default(&m->vocab, s->vocab);
    size_default(&m->dim, s->dim);
    size_default(&m->layers, s->layers);
    size_default(&m->heads, s->heads);
    size_default(&m->kv_heads, args_given("--heads") ? m->heads : s->kv_heads);
    size_default(&m->hidden, s->hidden);
    size_default(&m->seq, s->seq);
    size_default(&m->options->batch, s->batch);
}

static void sizes_check(const struct model *m) {
    if (m->dim % (2 * m->heads) != 0) {
        error_user(
            "--dim %ld cannot be cut into --heads %ld of an even width; choose a multiple of "
            "%ld",
            (long)m->dim, (long)m->heads, (long)(2 * m->heads));
    }
    if (m->heads % m->kv_heads != 0) {
        error_user("--heads %ld is not a multiple of --kv-heads %ld; each key head serves the same "
                   "number of query heads",
                   (long)m->heads, (long)m->kv_heads);
    }
}

void model_init(struct model *m, struct comm tp) {
    (void)tp;
    sizes_fill(m);
    sizes_check(m);
    m->rope = tensor_alloc(m->seq, m->dim / m->heads, DTYPE_F32, MEM_WORKSPACE);
    ops_rope_table(m->rope, m->rope_theta);
}

void model_free(struct model *m) {
    tensor_free(&m->rope);
    free(m);
}

const char *model_name(const struct model *m) {
    (void)m;
    return "llama";
}

const char *model_item(const struct model *m) {
    (void)m;
    return "tokens";
}

void model_describe(const struct model *m, char *text, size_t size) {
    snprintf(text, size, "%s: vocab %ld, dim %ld, layers %ld, heads %ld/%ld, hidden %ld, seq %ld",
             m->size, (long)m->vocab, (long)m->dim, (long)m->layers, (long)m->heads,
             (long)m->kv_heads, (long)m->hidden, (long)m->seq);
}

void model_write_config(const struct model *m, FILE *file) {
    fprintf(file,
            "{\n"
            "  \"architectures\": [\"LlamaForCausalLM\"],\n"
            "  \"attention_bias\": false,\n"
            "  \"bos_token_id\": null,\n"
            "  \"eos_token_id\": null,\n"
            "  \"hidden_act\": \"silu\",\n"
            "  \"hidden_size\": %ld,\n"
            "  \"intermediate_size\": %ld,\n"
            "  \"max_position_embeddings\": %ld,\n"
            "  \"mlp_bias\": false,\n"
            "  \"model_type\": \"llama\",\n"
            "  \"num_attention_heads\": %ld,\n"
            "  \"num_hidden_layers\": %ld,\n"
            "  \"num_key_value_heads\": %ld,\n"
            "  \"rms_norm_eps\": %.9g,\n"
            "  \"rope_theta\": %.9g,\n"
            "  \"tie_word_embeddings\": false,\n"
            "  \"torch_dtype\": \"float32\",\n"
            "  \"vocab_size\": %ld\n"
            "}\n",
            (long)m->dim, (long)m->hidden, (long)m->seq, (long)m->heads, (long)m->layers,
            (long)m->kv_heads, m->norm_eps, m->rope_theta, (long)m->vocab);
}

struct data *model_data(const struct model *m) {
    return data_open_text(m->options->data, m->seq, m->vocab, m->options->seed);
}

// ---- units -------------------------------------------------------------------------------------

int model_units(const struct model *m) {
    return m->layers + 2;
}

static int embedding_params(const struct model *m, struct param *out) {
    out[EMBEDDING] = (struct param){
        .name = "model.embed_tokens.weight",
        .rows = m->vocab,
        .cols = m->dim,
        .decay = true,
    };
    return 1;
}

static int block_params(const struct model *m, int layer, struct param *out) {
    size_t C = m->dim;
    size_t kv_rows = C / m->heads * m->kv_heads; // G*D
    const struct param params[] = {
        [NORM1_W] =
            {
                .name = "input_layernorm",
                .rows = C,
                .cols = 1,
            },
        [Q_W] =
            {
                .name = "self_attn.q_proj",
                .rows = C,
                .cols = C,
                .decay = true,
            },
        [K_W] =
            {
                .name = "self_attn.k_proj",
                .rows = kv_rows,
                .cols = C,
                .decay = true,
            },
        [VALUE_W] =
            {
                .name = "self_attn.v_proj",
                .rows = kv_rows,
                .cols = C,
                .decay = true,
            },
        [O_W] =
            {
                .name = "self_attn.o_proj",
                .rows = C,
                .cols = C,
                .decay = true,
            },
        [NORM2_W] =
            {
                .name = "post_attention_layernorm",
                .rows = C,
                .cols = 1,
            },
        [GATE_W] =
            {
                .name = "mlp.gate_proj",
                .rows = m->hidden,
                .cols = C,
                .decay = true,
            },
        [UP_W] =
            {
                .name = "mlp.up_proj",
                .rows = m->hidden,
                .cols = C,
                .decay = true,
            },
        [DOWN_W] =
            {
                .name = "mlp.down_proj",
                .rows = C,
                .cols = m->hidden,
                .decay = true,
            },
    };
    int count = sizeof params / sizeof params[0];
    for (int i = 0; i < count; i++) {
        out[i] = params[i];
        snprintf(out[i].name, sizeof out[i].name, "model.layers.%d.%.40s.weight", layer,
                 params[i].name);
    }
    return count;
}

static int head_params(const struct model *m, struct param *out) {
    out[HEAD_NORM_W] = (struct param){
        .name = "model.norm.weight",
        .rows = m->dim,
        .cols = 1,
    };
    out[HEAD_W] = (struct param){
        .name = "lm_head.weight",
        .rows = m->vocab,
        .cols = m->dim,
        .decay = true,
    };
    return 2;
}

int unit_params(const struct model *m, int u, struct param *out) {
    int count = 0;
    if (u == 0) {
        count = embedding_params(m, out);
    } else if (u <= m->layers) {
        count = block_params(m, u - 1, out);
    } else {
        count = head_params(m, out);
    }
    params_layout(out, count);
    return count;
}

void unit_init(const struct model *m, int u, struct tensor params) {
    struct param p[UNIT_PARAMS_MAX];
    int count = unit_params(m, u, p);
    ops_zero(params);
    for (int i = 0; i < count; i++) {
        struct tensor values = param_view(params, &p[i]);
        struct random_key key = {
            .seed = m->options->seed,
            .purpose = RANDOM_INIT,
            .id = u * UNIT_PARAMS_MAX + i,
        };
        if (p[i].decay) { // the matrices, and only they, decay
            ops_random_normal(values, key, p[i].place, 0.02f);
        } else {
            ops_fill(values, 1); // the weights of norms
        }
    }
}

static size_t head_dim(const struct model *m) {
    return m->dim / m->heads;
}

// Rows of the activations between units.
static size_t rows(const struct model *m, const struct batch *b) {
    return b->samples * m->seq;
}

// The global number of the first of these rows, counted from the start of training.
static uint64_t first_row(const struct model *m, const struct batch *b) {
    return b->first_sample * m->seq;
}

struct tensor unit_output(const struct model *m, int u, const struct batch *b) {
    if (u == m->layers + 1) {
        return (struct tensor){0};
    }
    return (struct tensor){
        .rows = rows(m, b),
        .cols = m->dim,
    };
}

static struct tensor activation(size_t rows, size_t cols) {
    return tensor_alloc(rows, cols, DTYPE_F32, MEM_ACTIVATIONS);
}

static struct tensor linear(struct tensor x, struct tensor w) {
    struct tensor y = activation(x.rows, w.rows);
    ops_linear(y, x, w, (struct tensor){0});
    return y;
}

static struct tensor rmsnorm(const struct model *m, struct tensor x, struct tensor w) {
    struct tensor y = tensor_like(x);
    ops_rmsnorm(y, x, w, m->norm_eps);
    return y;
}

// Dropout on x, in place, the same in forward and backward; `which` numbers those of a unit.
static void dropout(const struct model *m, int u, int which, const struct batch *b,
                    struct tensor x) {
    if (!b->train || m->dropout == 0) {
        return;
    }
    struct random_key key = {
        .seed = m->options->seed,
        .purpose = RANDOM_DROPOUT,
        .id = u * 2 + which,
    };
    struct place place = {
        .first_row = first_row(m, b),
        .whole_rows = SIZE_MAX,
        .whole_cols = m->dim,
    };
    ops_dropout(x, x, m->dropout, key, place);
}

// The weights, or the gradients, of a unit.
struct views {
    struct tensor t[UNIT_PARAMS_MAX];
};

static struct views views(const struct model *m, int u, struct tensor flat) {
    struct param p[UNIT_PARAMS_MAX];
    struct views v = {0};
    int count = unit_params(m, u, p);
    for (int i = 0; i < count; i++) {
        v.t[i] = param_view(flat, &p[i]);
    }
    return v;
}

static struct tensor embedding_forward(const struct model *m, struct tensor params,
                                       const struct batch *b) {
    struct tensor y = activation(rows(m, b), m->dim);
    ops_embedding(y, b->input, views(m, 0, params).t[EMBEDDING]);
    return y;
}

static void embedding_backward(const struct model *m, struct tensor dy, const struct batch *b,
                               struct tensor grads) {
    ops_embedding_dw(views(m, 0, grads).t[EMBEDDING], dy, b->input);
}

// x2 = x + dropout(attention(norm(x)))
static struct tensor attention_forward(const struct model *m, int u, const struct tensor *w,
                                       struct tensor x, const struct batch *b, struct tensor *t) {
    t[NORM1] = rmsnorm(m, x, w[NORM1_W]);
    t[Q] = linear(t[NORM1], w[Q_W]);
    t[K] = linear(t[NORM1], w[K_W]);
    t[VALUE] = linear(t[NORM1], w[VALUE_W]);
    ops_rope(t[Q], m->rope, false);
    ops_rope(t[K], m->rope, false);
    t[ATTENTION] = tensor_like(t[Q]);
    t[LSE] = activation(x.rows, t[Q].cols / head_dim(m));
    ops_attention(t[ATTENTION], t[LSE], t[Q], t[K], t[VALUE], m->seq, head_dim(m));
    struct tensor x2 = linear(t[ATTENTION], w[O_W]);
    dropout(m, u, 0, b, x2);
    ops_add(x2, x);
    return x2;
}

// y = x2 + dropout(mlp(norm(x2)))
static struct tensor mlp_forward(const struct model *m, int u, const struct tensor *w,
                                 struct tensor x2, const struct batch *b, struct tensor *t) {
    t[NORM2] = rmsnorm(m, x2, w[NORM2_W]);
    t[GATE] = linear(t[NORM2], w[GATE_W]);
    t[UP] = linear(t[NORM2], w[UP_W]);
    t[MIXED] = tensor_like(t[UP]);
    ops_swiglu(t[MIXED], t[GATE], t[UP]);
    struct tensor y = linear(t[MIXED], w[DOWN_W]);
    dropout(m, u, 1, b, y);
    ops_add(y, x2);
    return y;
}

static struct tensor block_forward(const struct model *m, int u, struct tensor params,
                                   struct tensor x, const struct batch *b, struct tensor *t) {
    struct views w = views(m, u, params);
    t[X2] = attention_forward(m, u, w.t, x, b, t);
    return mlp_forward(m, u, w.t, t[X2], b, t);
}

// dy becomes dx2 = dy + d(mlp). Frees what it no longer needs as it goes.
static void mlp_backward(const struct model *m, int u, const struct tensor *w,
                         const struct tensor *dw, const struct batch *b, struct tensor *t,
                         struct tensor dy) {
    struct tensor dz = tensor_like(dy); // gradient of the branch
    ops_copy(dz, dy);
    dropout(m, u, 1, b, dz);
    struct tensor none = {0};
    struct tensor dmixed = tensor_like(t[MIXED]);
    ops_linear_dx(dmixed, dz, w[DOWN_W], false);
    ops_linear_dw(dw[DOWN_W], none, dz, t[MIXED]);
    tensor_free(&dz);
    tensor_free(&t[MIXED]);
    ops_swiglu_backward(t[GATE], t[UP], dmixed, t[GATE], t[UP]); // gate and up become gradients
    tensor_free(&dmixed);
    ops_linear_dw(dw[GATE_W], none, t[GATE], t[NORM2]);
    ops_linear_dw(dw[UP_W], none, t[UP], t[NORM2]);
    tensor_free(&t[NORM2]);
    struct tensor dnorm = tensor_like(dy);
    ops_linear_dx(dnorm, t[GATE], w[GATE_W], false);
    ops_linear_dx(dnorm, t[UP], w[UP_W], true);
    tensor_free(&t[GATE]);
    tensor_free(&t[UP]);
    ops_rmsnorm_backward(dy, dw[NORM2_W], dnorm, t[X2], w[NORM2_W], m->norm_eps, true);
    tensor_free(&dnorm);
    tensor_free(&t[X2]);
}

// dx2 becomes dx = dx2 + d(attention).
static void attention_backward(const struct model *m, int u, const struct tensor *w,
                               const struct tensor *dw, const struct batch *b, struct saved *saved,
                               struct tensor dx2) {
    struct tensor *t = saved->t;
    struct tensor dz = tensor_like(dx2);
    ops_copy(dz, dx2);
    dropout(m, u, 0, b, dz);
    struct tensor none = {0};
    struct tensor dattention = tensor_like(t[ATTENTION]);
    ops_linear_dx(dattention, dz, w[O_W], false);
    ops_linear_dw(dw[O_W], none, dz, t[ATTENTION]);
    tensor_free(&dz);
    struct tensor dq = tensor_like(t[Q]);
    struct tensor dk = tensor_like(t[K]);
    struct tensor dv = tensor_like(t[VALUE]);
    ops_attention_backward(dq, dk, dv, dattention, t[ATTENTION], t[LSE], t[Q], t[K], t[VALUE],
                           m->seq, head_dim(m));
    tensor_free(&dattention);
    ops_rope(dq, m->rope, true);
    ops_rope(dk, m->rope, true);
    ops_linear_dw(dw[Q_W], none, dq, t[NORM1]);
    ops_linear_dw(dw[K_W], none, dk, t[NORM1]);
    ops_linear_dw(dw[VALUE_W], none, dv, t[NORM1]);
    struct tensor dnorm = tensor_like(dx2);
    ops_linear_dx(dnorm, dq, w[Q_W], false);
    ops_linear_dx(dnorm, dk, w[K_W], true);
    ops_linear_dx(dnorm, dv, w[VALUE_W], true);
    tensor_free(&dq);
    tensor_free(&dk);
    tensor_free(&dv);
    ops_rmsnorm_backward(dx2, dw[NORM1_W], dnorm, saved->x, w[NORM1_W], m->norm_eps, true);
    tensor_free(&dnorm);
}

static void block_backward(const struct model *m, int u, struct tensor params, struct saved *saved,
                           struct tensor dy, const struct batch *b, struct tensor grads) {
    struct views w = views(m, u, params);
    struct views dw = views(m, u, grads);
    mlp_backward(m, u, w.t, dw.t, b, saved->t, dy);
    attention_backward(m, u, w.t, dw.t, b, saved, dy);
}

// Stores the sum of the cross entropies, and how many bytes were guessed right.
static void cross_entropy(const struct model *m, const struct batch *b, struct tensor *t) {
    size_t first_col = 0; // this rank has all columns of the logits
    t[ROW_MAX] = activation(t[LOGITS].rows, 1);
    t[ROW_SUM] = activation(t[LOGITS].rows, 1);
    struct tensor target_logit = activation(t[LOGITS].rows, 1);
    ops_row_max(t[ROW_MAX], t[LOGITS], first_col, m->vocab);
    ops_row_exp_sum(t[ROW_SUM], target_logit, t[LOGITS], t[ROW_MAX], b->targets, first_col,
                    m->vocab);
    ops_cross_entropy(b->loss, t[ROW_SUM], target_logit, b->targets);
    tensor_free(&target_logit);
}

static void head_forward(const struct model *m, int u, struct tensor params, struct tensor x,
                         const struct batch *b, struct tensor *t) {
    struct views w = views(m, u, params);
    t[HEAD_NORM] = rmsnorm(m, x, w.t[HEAD_NORM_W]);
    t[LOGITS] = linear(t[HEAD_NORM], w.t[HEAD_W]);
    cross_entropy(m, b, t);
}

static struct tensor head_backward(const struct model *m, int u, struct tensor params,
                                   const struct saved *saved, const struct batch *b,
                                   struct tensor grads) {
    struct views w = views(m, u, params);
    struct views dw = views(m, u, grads);
    const struct tensor *t = saved->t;
    size_t first_col = 0; // this rank has all columns of the logits
    ops_cross_entropy_backward(t[LOGITS], t[ROW_MAX], t[ROW_SUM], b->targets, first_col, m->vocab,
                               b->scale); // logits become their gradients
    struct tensor dnorm = tensor_like(t[HEAD_NORM]);
    struct tensor dx = tensor_like(saved->x);
    ops_linear_dx(dnorm, t[LOGITS], w.t[HEAD_W], false);
    ops_linear_dw(dw.t[HEAD_W], (struct tensor){0}, t[LOGITS], t[HEAD_NORM]);
    ops_rmsnorm_backward(dx, dw.t[HEAD_NORM_W], dnorm, saved->x, w.t[HEAD_NORM_W], m->norm_eps,
                         false);
    tensor_free(&dnorm);
    return dx;
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
        y = embedding_forward(m, params, b);
    } else if (u <= m->layers) {
        y = block_forward(m, u, params, x, b, saved->t);
    } else {
        head_forward(m, u, params, x, b, saved->t);
    }
    return y;
}

struct tensor unit_backward(const struct model *m, int u, struct tensor params, struct saved *saved,
                            struct tensor dy, const struct batch *b, struct tensor grads) {
    struct tensor dx = {0};
    if (u == 0) {
        embedding_backward(m, dy, b, grads);
        tensor_free(&dy);
    } else if (u <= m->layers) {
        block_backward(m, u, params, saved, dy, b, grads);
        dx = dy;
    } else {
        dx = head_backward(m, u, params, saved, b, grads);
    }
    padding_zero(m, u, grads);
    saved_free(saved);
    return dx;
}
