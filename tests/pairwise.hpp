// Cases in which each value of a list meets each value of every other list, without the full
// product of the lists: faults that hang on two values at a time are found by a tenth of the cases.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

namespace oracle {

/// Rows of one index for each list, in which any two indices of two lists stand together at least
/// once. Greedy: each row begins with a pair that is missing and takes what covers most others.
template <std::size_t Lists>
std::vector<std::array<std::size_t, Lists>> pairwise_rows(
    const std::array<std::size_t, Lists>& sizes) {
  using choice = std::pair<std::size_t, std::size_t>;  // list, index
  std::set<std::pair<choice, choice>> missing;
  for (std::size_t a = 0; a < Lists; ++a)
    for (std::size_t b = a + 1; b < Lists; ++b)
      for (std::size_t x = 0; x < sizes[a]; ++x)
        for (std::size_t y = 0; y < sizes[b]; ++y) missing.insert({{a, x}, {b, y}});

  std::vector<std::array<std::size_t, Lists>> rows;
  while (!missing.empty()) {
    const auto [first, second] = *missing.begin();
    std::vector<choice> row{first, second};
    const auto covers = [&](choice candidate) {
      std::size_t count = 0;
      for (const choice& taken : row)
        count += missing.count(taken < candidate ? std::pair{taken, candidate}
                                                 : std::pair{candidate, taken});
      return count;
    };
    for (std::size_t list = 0; list < Lists; ++list) {
      if (list == first.first || list == second.first) continue;
      choice best{list, rows.size() % sizes[list]};  // where nothing is missing, each in turn
      for (std::size_t x = 0; x < sizes[list]; ++x)
        if (covers({list, x}) > covers(best)) best.second = x;
      row.push_back(best);
    }
    std::array<std::size_t, Lists> indices{};
    for (const choice& a : row) {
      indices[a.first] = a.second;
      for (const choice& b : row)
        if (a < b) missing.erase({a, b});
    }
    rows.push_back(indices);
  }
  return rows;
}

/// Calls f(value of each list) for such rows.
template <class F, class... List>
void for_each_pairing(F&& f, const List&... lists) {
  const std::array<std::size_t, sizeof...(List)> sizes{std::size(lists)...};
  for (const auto& row : pairwise_rows(sizes)) [&]<std::size_t... At>(std::index_sequence<At...>) {
      f(*std::next(std::begin(lists), static_cast<std::ptrdiff_t>(row[At]))...);
    }
  (std::index_sequence_for<List...>{});
}

}  // namespace oracle
