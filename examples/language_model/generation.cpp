#include "generation.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "random.hpp"

namespace language_model {

growing_sequence::growing_sequence(const language_model::model& model,
                                   const attention_method& method, cache_type type,
                                   thread_pool& pool)
    : model_(model), pass_(model, pool), attention_(method, model.config(), type, pool) {}

void growing_sequence::extend_block(std::span<const token_id> tokens) {
  const index_t first = attention_.size();
  pass_.embed(tokens, stream_);
  for (index_t l = 0; l < model_.config().layers; ++l)
    pass_.layer(l, stream_, std::ref(attention_), first);
}

void growing_sequence::extend(std::span<const token_id> tokens, index_t block,
                              const progress_function& progress) {
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(static_cast<std::size_t>(block), tokens.size() - done);
    extend_block(tokens.subspan(done, count));
    done += count;
    if (progress) progress(static_cast<index_t>(done));
  }
}

const matrix& growing_sequence::logits() {
  pass_.next_token_logits(stream_, logits_);
  return logits_;
}

double growing_sequence::negative_log_likelihood(std::span<const token_id> tokens, index_t block) {
  matrix all(static_cast<index_t>(tokens.size()), model_.config().d_model);
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(static_cast<std::size_t>(block), tokens.size() - done);
    extend_block(tokens.subspan(done, count));
    all.middleRows(static_cast<index_t>(done), static_cast<index_t>(count)) = stream_;
    done += count;
  }
  return pass_.negative_log_likelihood(all, tokens);
}

token_id choose_token(const matrix& logits, const sampling& how, std::mt19937_64& random) {
  const auto logit = [&](token_id t) {
    return logits(0, t);
  };
  token_id best = 0;
  for (token_id t = 1; t < logits.cols(); ++t)
    if (logit(t) > logit(best)) best = t;
  if (how.temperature <= 0) return best;

  std::vector<double> weight(static_cast<std::size_t>(logits.cols()));
  for (std::size_t t = 0; t < weight.size(); ++t)
    weight[t] = std::exp(static_cast<double>(logit(static_cast<token_id>(t)) - logit(best)) /
                         static_cast<double>(how.temperature));
  const double all = std::accumulate(weight.begin(), weight.end(), 0.0);
  std::vector<token_id> order(weight.size());
  std::iota(order.begin(), order.end(), token_id{0});
  std::stable_sort(order.begin(), order.end(), [&](token_id a, token_id b) {
    return weight[static_cast<std::size_t>(a)] > weight[static_cast<std::size_t>(b)];
  });
  // As many as have the share together, one at least; then one of these by its weight.
  double kept = 0;
  std::size_t count = 0;
  while (count < order.size() && (count == 0 || kept < static_cast<double>(how.top_p) * all))
    kept += weight[static_cast<std::size_t>(order[count++])];
  double left = uniform(random) * kept;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    left -= weight[static_cast<std::size_t>(order[i])];
    if (left < 0) return order[i];
  }
  return order[count - 1];
}

}  // namespace language_model
