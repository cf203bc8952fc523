// Operands: the type E in which a tile packs Q, K and V and multiplies them, and all that hangs on
// it, operand<E>. For float and double, to which every storage type can be widened, it is in
// kernel/widened_operand.hpp; for bfloat16 that is multiplied as it is stored, where the
// instruction set has such products, in kernel/amx.hpp and kernel/bfmmla.hpp. It has
//
//   scope         what a thread holds while it packs and multiplies: a base of query_tile
//   score_factor  what q . k is still to be multiplied by before it is a score in units of log2
//                 (or, where scores are capped, the argument of tanh)
//     set(factor)
//     apply<Rows>(scores, count, capped)
//                 multiplies the scores of a strip, or leaves that to weigh_row; returns what is
//                 left to be multiplied by, which is above 0: the largest product is then the
//                 largest score. capped: nothing may be left
//   pack_queries(rows, depth, factor, row_of, to)
//                 packs the query rows row_of(0) ... row_of(rows - 1), times `factor` unless
//                 score_factor keeps that; zeros fill up the last strip
//   pack_key_panel(row_of, depth, to)
//                 packs the rows row_of(0) ... row_of(panel - 1) as one key panel; null: none
//   pack_value_panel(row_of, width, first, stride, panels)
//                 packs the same rows' values, from slot `first` on, in all value panels; true when
//                 an element is NaN or infinite
//   score_slots<Rows>(query, keys, base, end, scores)
//                 scores[r][slot - base] = query row r . key, for slots [base, end): what
//                 score_factor then multiplies. base is a multiple of tile_sizes::score_step
//   weigh_row(r, shift, factor, count, row)
//                 turns `count` scores of row r of a strip into its weights, 2^(factor score -
//                 shift), in place and as accumulate takes them; returns their sums
//   accumulate<Rows>(strip, keys, seen, weights, rescale)
//                 acc = rescale * acc + weights * values over the slots of `seen`. weights:
//                 [rows][score_stride], of slot seen.begin on
//   accumulate_seen<Rows>(strip, keys, seen, weights, rescale, sees)
//                 the same bits, without touching a value that a row may not see (sees(r, slot)):
//                 0 * NaN is not 0. For the rare block in which some value is NaN or infinite and
//                 some row does not see all keys
#pragma once

#include "focus/config.hpp"
#include "focus/kernel/amx.hpp"
#include "focus/kernel/bfmmla.hpp"
#include "focus/kernel/widened_operand.hpp"
