#pragma once
/// \file
/// The linear-attention systems by name: each is a `linear<map, decay, update, normaliser>`. A block says what the core
/// computes, from what it is to be given, what the layer does around it, and where public code differs.
///
///     sash::kv_cache cache(sash::systems::gla{}, {.heads = 4, .head_dim = 128});
///
/// Written everywhere: S [features, value_dim] is the state, k and q the features of key and query, alpha = exp(g) with g
/// the token's `.decay` (made by the functions of gate.hpp), K the key dim. Projections, convolutions, token shift, norms
/// and output gates belong to the layer. Where nothing is said the state is read after the token is written.
///
/// "GQA": what may be shared. A state exists once for each head of the most finely divided operand; where a key map,
/// a decay or a beta differs between query heads, each query head has its own.
#include <sash/gate.hpp>
#include <sash/hybrid.hpp>
#include <sash/linear.hpp>

namespace sash::systems {

// ------------------------------------------------------------------------------------- feature maps, nothing forgotten

/// S = S + k v^T, z = z + k; out = S^T q / z·q, with phi(x) = elu(x) + 1.
/// The original code adds 1e-6 to the sum, flash-linear-attention 1e-10: `.normaliser = {.epsilon = 1e-6f}`.
/// Source: Katharopoulos et al. 2020, "Transformers are RNNs".
using katharopoulos = linear<elu_plus_one>;

/// As above, with a learned phi(x) = relu(W_h x + b_h), W for each head. A query without any feature gives a row of 0.
/// Without rotary positions W folds into the projections; then `linear<relu>` is enough. LoLCATs' "relu" has
/// `.least = 1e-12f` and one bias a head (say it for every feature).
/// Source: Kasai et al. 2021, "Finetuning pretrained transformers into RNNs".
using t2r = linear<relu_affine>;

/// As above, with random features of the softmax. The keys are kept in range by the largest exponent SO FAR; public code
/// takes that of the whole call, and so changes earlier rows when later keys come. Its `epsilon` is 1e-4 or 1e-6.
/// Source: Choromanski et al. 2020, "Rethinking attention with performers".
using performer = linear<favor>;

/// As above, phi(x) = [relu(x) sin theta, relu(x) cos theta], theta by the position, up to a fixed M. Public code takes
/// M from the length of each call, and keeps the sum above 1e-6: `.normaliser = {.least = 1e-6f}`.
/// Source: Qin et al. 2022, "cosFormer".
using cosformer = linear<sash::cosformer>;

/// As above, with the Taylor expansion of exp(q·k / sqrt(K)) to second order; query and key are projected to few dims (16).
/// Public code adds 1e-6 (naive form) or 1e-12 (layer) to the sum; its layer also applies the scale twice.
/// Source: Arora et al. 2024, "Simple linear attention language models balance the recall-throughput tradeoff".
using based = linear<taylor_2>;

/// As above, with the square of a product of learned, normalised rows. Public code adds 1e-6 or 1e-5 to the sum.
/// Source: Aksenov et al. 2024, "Linear transformers with learnable kernel functions are better in-context models".
using rebased = linear<sash::rebased>;

/// As above, with a learned map that imitates the softmax, in four forms that are not equivalent (see hedgehog_form).
/// GQA: with a key matrix for each query head, a state for each.
/// Source: Zhang et al. 2024, "The hedgehog & the porcupine".
using hedgehog = linear<sash::hedgehog>;

// ------------------------------------------------------------------------------------------------ decays of fixed pace

/// S = alpha_h S + k v^T; out = S^T q / sqrt(K). `.decay = alibi_decays(heads)`, or retnet_decays. Query and key arrive
/// behind relu(M x + c), where M mixes heads and so is the layer's, and then the rotary turn.
/// Behind it: group norm without weights, eps 1e-5. GQA: a state for each query head (`gate_heads = heads`).
/// Public code scales k instead of the row and decays after the read: its states are alpha / sqrt(K) times ours.
/// Source: Mercat et al. 2024, "Linearizing large language models".
using supra = linear<identity, constant_per_head, additive, no_normaliser>;

/// The same core with `.decay = retnet_decays(heads)`. Query and key arrive turned: interleaved pairs, angles
/// 10000^(-j / (K/2 - 1)). Behind it: RMS norm of the head without weights, eps 1e-6, times SiLU of a gate.
/// Public code may divide rows by positive numbers first (they cancel in the norm), and scales k instead of the row.
/// flash-linear-attention turns halves and has a norm with weights: not the same weights.
/// Source: Sun et al. 2023, "Retentive network".
using retnet = linear<identity, constant_per_head, additive, no_normaliser>;

/// S = alpha_h S + k v^T; out = S^T q: no scale. `.decay = lightning_decays(heads, layer, layers)`. Query, key and value
/// arrive behind SiLU, as the fused projection leaves them. Behind it: RMS norm over all heads, times a sigmoid gate.
/// flash-linear-attention has another table of decays and a scale.
/// Source: Qin et al. 2024, "Lightning attention-2"; MiniMax 2025, "MiniMax-01".
using lightning = linear<identity, constant_per_head, additive, unscaled>;

// -------------------------------------------------------------------------------------------------- decays by the token

/// S = diag(alpha) S + k v^T; out = S^T q / sqrt(K). g by feature: gate::gla. Behind it: RMS norm of the head, eps 1e-5,
/// times SiLU of a gate. GQA: a state for each KV head, where the gates are made for KV heads.
/// Source: Yang et al. 2024, "Gated linear attention transformers with hardware-efficient training".
using gla = linear<identity, per_channel_and_token, additive, no_normaliser>;

/// The same with one g per head.
using simple_gla = linear<identity, per_head_and_token, additive, no_normaliser>;

/// The linear half of Liger-GLA (mixed half and half with a window): phi = softmax over the dims, g = gate::gla of the raw
/// keys, by feature; out = S^T q, not divided, no scale. Query and key are not turned.
/// GQA: a state for each KV head suffices; public code repeats key and value first.
/// Source: Lan et al. 2025, "Liger: linearizing large language models to gated recurrent structures".
using liger_linear = linear<softmax_dim, per_channel_and_token, additive, unscaled>;

// ------------------------------------------------------------------------------------------------------------- hybrids

/// A sliding window over what is near, Hedgehog features (H3, phi_q and phi_k for each query head) over the rest, under
/// one denominator: see shared_denominator. Query and key are turned before both. `.window = {.window = 64}`,
/// `.linear = {.map = {…}}`, `.combine = {.window_factors = …}`, as the checkpoint has them (before the sigmoid). Sinks
/// in the window stay exact and out of the state. GQA: with a key matrix for each query head, a state for each.
/// Public code: a prompt in several parts loses a window of tokens at each cut; states are kept in bfloat16, in which a
/// sum of 2,048 features has lost 44 %.
/// Source: Zhang et al. 2025, "LoLCATs: on low-rank linearizing of large language models".
using lolcats = hybrid<sliding_window, linear<sash::hedgehog>, shared_denominator>;

/// The same with the window in steps, as LoLCATs' "tk" layers are trained: see terraced_window. Its decode is lolcats'.
using lolcats_terraced = hybrid<terraced_window, linear<sash::hedgehog>, shared_denominator>;

/// Half a softmax over a sliding window of turned query and key, half liger_linear over every token, not turned:
/// `.rotary = {…, .by = rotates::library}`. `.decay` = gate::gla of the raw keys, by feature.
/// `.window = sliding_window::from_left(64)` is 65 keys, which is what its public code had with the transformers of its
/// day; later ones give it 64. Its decode forgets the window: take rows of the whole sequence to compare.
/// GQA: a state for each KV head suffices.
/// Source: Lan et al. 2025, "Liger: linearizing large language models to gated recurrent structures".
using liger_gla = hybrid<sliding_window, liger_linear, convex>;

/// Mamba-2: S = alpha S + B (dt x)^T; y = S^T C, no scale. query = C, key = B, shared by the heads of a group; value =
/// dt · x with dt = gate::mamba_step; g = gate::mamba, by head. Around it: a causal convolution and SiLU of x, B, C; the
/// skip D x; SiLU(z) as a gate, then RMS norm.
/// Public code keeps its state in the type of the weights, and cannot go on from one with several tokens.
/// Source: Dao and Gu 2024, "Transformers are SSMs".
using mamba2 = linear<identity, per_head_and_token, additive, unscaled>;

/// The same core with g = gate::mohawk and the value not scaled by dt: MOHAWK's Phi-Mamba. A convolution without
/// activation; D x; SiLU(z + bias) as a gate, no norm. Public code divides x by softplus(a), so that its kernel's dt cancels.
/// Source: Bick et al. 2024, "Transformers to SSMs: distilling quadratic knowledge to subquadratic models".
using mohawk = linear<identity, per_head_and_token, additive, unscaled>;

/// Mamba's selective scan: h[d, n] = exp(dt[d] A[d, n]) h[d, n] + dt[d] B[n] x[d]; y[d] = sum_n C[n] h[d, n]. One head a
/// channel d: heads = value_heads = gate_heads = channels, query_heads = key_heads = 1, key_dim = states n, value_dim = 1;
/// query = C, key = B, value = dt · x, g[d, n] = gate::mamba(dt[d], A_log[d, n]). No scale.
/// Source: Gu and Dao 2023, "Mamba: linear-time sequence modeling with selective state spaces".
using mamba = linear<identity, per_channel_and_token, additive, unscaled>;

/// out = (S + (u ⊙ k) v^T)^T q, then S = diag(alpha) S + k v^T: the state is read before the token is written. query = r,
/// u = `.update = {bonus}`, g = gate::rwkv6 by feature; no scale. Around it: token shift; group norm by head, eps 64e-5,
/// times SiLU of a gate. flash-linear-attention's layer has eps 1e-5.
/// Source: Peng et al. 2024, "Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence".
using rwkv6 = linear<identity, per_channel_and_token, exclusive_bonus, unscaled>;

/// What is called RWKV-6 in Qwen's body is a GLA: no bonus, read after writing, scale 1 / sqrt(K). g = gate::qrwkv6, made
/// for query heads, so that each has a state; key = k (1 - exp(g)). llama.cpp does not clamp the gate.
/// Source: Goldstein et al. 2025, "RADLADS".
using qrwkv6 = linear<identity, per_channel_and_token, additive, no_normaliser>;

// ----------------------------------------------------------------------------------------------- rules that also remove

/// S = diag(alpha) S + d (a^T S) + k v^T; out = S^T q, no scale. With RWKV-7's names: query = r, a = -kk, d = kk ⊙ a, where
/// kk = l2norm(k ⊙ k_k) and key = k ⊙ (1 + (a - 1) k_a); g = gate::rwkv7 by feature. Behind it: group norm by head, eps
/// 64e-5, plus (r·k ⊙ r_k) v, times a gate. l2norm divides by max(norm, 1e-12) in PyTorch, by sqrt(sum + 1e-6) elsewhere.
/// Source: Peng et al. 2025, "RWKV-7 Goose with expressive dynamic state evolution".
using rwkv7 = linear<identity, per_channel_and_token, diagonal_plus_low_rank, unscaled>;

/// The same core in Qwen's body: no token shift, rotary turn of r and k before kk, no r_k term; g = gate::qrwkv7. Its code
/// overwrites "a" by 1 + (a - 1) k_a before it forms d = kk ⊙ a: follow it for its weights.
/// Source: Goldstein et al. 2025, "RADLADS".
using qrwkv7 = rwkv7;

/// S = S + beta k (v - S^T k)^T; out = S^T q / sqrt(K), with unit query and key. Query, key and value arrive behind their
/// convolution and SiLU; beta = gate::sigmoid, or twice that. Behind it: RMS norm of the head, perhaps a gate.
/// (Query and key straight from a projection: `linear<l2_normalised<silu>, …>`.)
/// Source: Yang et al. 2024, "Parallelizing linear transformers with the delta rule over sequence length".
using deltanet = linear<l2_normalised<>, no_decay, delta, no_normaliser>;

/// S' = alpha S, S = S' + beta k (v - S'^T k)^T; out as above. g = gate::gated_delta by head. Qwen3-Next: 16 query and
/// key heads, 32 value heads, a state for each value head; RMS norm of the head, then SiLU(z) as a gate.
/// Source: Yang et al. 2024, "Gated delta networks: improving Mamba2 with delta rule".
using gated_deltanet = linear<l2_normalised<>, per_head_and_token, delta, no_normaliser>;

/// The same with g by feature: gate::kda or gate::kda_bounded. RMS norm of the head times a sigmoid gate.
/// Source: Kimi team 2025, "Kimi Linear: an expressive, efficient attention architecture".
using kda = linear<l2_normalised<>, per_channel_and_token, delta, no_normaliser>;

}  // namespace sash::systems
