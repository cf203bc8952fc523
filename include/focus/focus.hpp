// Focus sparse attention on CPUs (arXiv 2604.03260). Read in the order of the method:
#pragma once

// The order is the method's, not the alphabet's.
// clang-format off
#include "focus/config.hpp"            // version, instruction set
#include "focus/team.hpp"              // an engine's threads, each of which calls, as an executor

// hidden states to groups
#include "focus/centroids.hpp"         // centroid scores S = (H W_g) C^T                   Eq. 1
#include "focus/sinkhorn.hpp"          // balanced soft assignment; the causal form of it
#include "focus/top_k.hpp"             // the k best groups of each token, as a bit mask
#include "focus/route.hpp"             // the three at once: hidden states to masks
#include "focus/routing_plan.hpp"      // masks to cells: which pairs are computed

// attention
#include "focus/attention.hpp"         // dense and windowed attention, sinks
#include "focus/sparse_attention.hpp"  // exactly the pairs of a plan
#include "focus/soft_gate.hpp"         // all pairs, gated by their routing (training)      Eq. 2
#include "focus/merge.hpp"             // two partial results over disjoint keys into one

// generation
#include "focus/kv_cache.hpp"          // keys and values of a growing sequence, by cell
#include "focus/decode.hpp"            // its last tokens attend to it

// gradients
#include "focus/centroids_backward.hpp"
#include "focus/sinkhorn_backward.hpp"
#include "focus/attention_backward.hpp"
#include "focus/soft_gate_backward.hpp"
#include "focus/sparse_attention_backward.hpp"
#include "focus/retained_mass.hpp"  // what a routing keeps of full attention: the loss of a router

#include "focus/reference.hpp"         // the O(n^2) textbook form of each, in double
// clang-format on
