// The gradients of Eq. 1 against central differences, the textbook form and the naive form in
// float, by hand, bit for bit where that is promised, and what is refused.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/centroids.hpp"
#include "focus/centroids_backward.hpp"
#include "focus/parallel.hpp"
#include "focus/reference.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"
#include "routing_cases.hpp"

namespace test_centroids_backward {
namespace {

using namespace oracle;
using values = std::vector<double>;

enum wanted : unsigned { hidden = 1, projection = 2, bias = 4, centroids = 8, everything = 15 };

/// The outputs of one case, in G.
template <class G>
struct gradients {
  guarded_tensor<G, 2> dhidden, dprojection, dcentroids;
  guarded_tensor<G, 1> dbias;

  explicit gradients(const router_case& c)
      : dhidden({c.n, c.d_model}, c.memory),
        dprojection({c.d_model, c.d_group}, c.memory),
        dcentroids({c.groups, c.d_group}, c.memory),
        dbias({c.d_group}, c.memory) {}

  std::span<G> bias_span() {
    return {dbias.view().data(), static_cast<std::size_t>(dbias.view().extent(0))};
  }
  bool guards_hold() const {
    return dhidden.guards_hold() && dprojection.guards_hold() && dcentroids.guards_hold() &&
           dbias.guards_hold();
  }
  bool same_bits(const gradients& other) const {
    return dhidden.same_bits(other.dhidden) && dprojection.same_bits(other.dprojection) &&
           dcentroids.same_bits(other.dcentroids) && dbias.same_bits(other.dbias);
  }
  std::vector<values> all() const {
    return {dhidden.values(), dprojection.values(), dbias.values(), dcentroids.values()};
  }
};

template <class DS>
guarded_tensor<DS, 2> make_dscores(const router_case& c) {
  guarded_tensor<DS, 2> ds({c.n, c.groups}, c.memory);
  generator random(c.seed + 50);
  ds.fill([&] { return random.normal(); });
  return ds;
}

/// The gradients of type G that `outputs` names; the others are left as they were.
template <class G, class H, class T, class DS, class Exec = focus::serial_executor>
gradients<G> backward(const router_problem<H, T>& p, const guarded_tensor<DS, 2>& dscores,
                      unsigned outputs = everything, Exec&& exec = {}) {
  gradients<G> to(p.spec);
  const auto if_wanted = [&](unsigned output, auto view) {
    return (outputs & output) != 0 ? view : decltype(view){};
  };
  focus::centroid_scores_backward(
      p.hidden.view(), p.params(), dscores.view(), if_wanted(hidden, to.dhidden.view()),
      if_wanted(projection, to.dprojection.view()), if_wanted(bias, to.bias_span()),
      if_wanted(centroids, to.dcentroids.view()), exec);
  return to;
}

/// A router in double, dense, exactly as stored, and its gradients from the textbook.
struct dense_router {
  router_case spec;
  values h, w, b, c;

  template <class H, class T>
  explicit dense_router(const router_problem<H, T>& p)
      : spec(p.spec), h(p.hidden.values()), w(p.projection.values()), c(p.centroids.values()) {
    for (const T& x : p.bias) b.push_back(widened(x));
  }
  focus::matrix_view<const double> hidden_view() const {
    return {h.data(), {spec.n, spec.d_model}};
  }
  focus::centroid_params<double> params() const {
    return {{w.data(), {spec.d_model, spec.d_group}},
            {c.data(), {spec.groups, spec.d_group}},
            b,
            spec.metric};
  }
  std::vector<values> gradient(const values& dscores) const {
    router_case dense = spec;
    dense.memory = layout::heads_first;
    gradients<double> to(dense);
    focus::reference::centroid_scores_backward(
        hidden_view(), params(),
        focus::matrix_view<const double>(dscores.data(), {spec.n, spec.groups}), to.dhidden.view(),
        to.dprojection.view(), to.bias_span(), to.dcentroids.view());
    return to.all();
  }
  double loss(const values& dscores) const {
    values scores(dscores.size());
    focus::centroid_scores(hidden_view(), params(),
                           focus::matrix_view<double>(scores.data(), {spec.n, spec.groups}));
    double sum = 0;
    for (std::size_t x = 0; x < scores.size(); ++x) sum += scores[x] * dscores[x];
    return sum;
  }
};

/// What anyone would write, with all sums in float: the four gradients, and dZ.
std::vector<values> naive_gradient(const dense_router& p, const values& dscores) {
  const router_case& spec = p.spec;
  using matrix = std::vector<float>;
  const auto n = static_cast<std::size_t>(spec.n), d_model = static_cast<std::size_t>(spec.d_model),
             d_group = static_cast<std::size_t>(spec.d_group),
             groups = static_cast<std::size_t>(spec.groups);
  const matrix h(p.h.begin(), p.h.end()), w(p.w.begin(), p.w.end()),
      ds(dscores.begin(), dscores.end());
  matrix z(n * d_group), c(p.c.begin(), p.c.end());
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t x = 0; x < d_group; ++x) {
      float sum = p.b.empty() ? 0 : static_cast<float>(p.b[x]);
      for (std::size_t m = 0; m < d_model; ++m) sum += h[i * d_model + m] * w[m * d_group + x];
      z[i * d_group + x] = sum;
    }
  const auto normalize = [&](matrix& rows) {
    std::vector<float> lengths;
    for (std::size_t r = 0; r * d_group < rows.size(); ++r) {
      float squares = 0;
      for (std::size_t x = 0; x < d_group; ++x)
        squares += rows[r * d_group + x] * rows[r * d_group + x];
      lengths.push_back(std::sqrt(squares));
      for (std::size_t x = 0; x < d_group; ++x) rows[r * d_group + x] /= lengths.back();
    }
    return lengths;
  };
  const bool cosine = spec.metric == focus::similarity::cosine;
  std::vector<float> z_lengths, c_lengths;
  if (cosine) z_lengths = normalize(z), c_lengths = normalize(c);
  matrix dz(z.size()), dc(c.size()), dh(h.size()), dw(w.size()), db(d_group);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t g = 0; g < groups; ++g)
      for (std::size_t x = 0; x < d_group; ++x) {
        dz[i * d_group + x] += ds[i * groups + g] * c[g * d_group + x];
        dc[g * d_group + x] += ds[i * groups + g] * z[i * d_group + x];
      }
  const auto normalize_backward = [&](const matrix& rows, const std::vector<float>& lengths,
                                      matrix& drows) {
    for (std::size_t r = 0; r < lengths.size(); ++r) {
      float along = 0;
      for (std::size_t x = 0; x < d_group; ++x)
        along += rows[r * d_group + x] * drows[r * d_group + x];
      for (std::size_t x = 0; x < d_group; ++x)
        drows[r * d_group + x] =
            (drows[r * d_group + x] - rows[r * d_group + x] * along) / lengths[r];
    }
  };
  if (cosine) normalize_backward(z, z_lengths, dz), normalize_backward(c, c_lengths, dc);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t x = 0; x < d_group; ++x) {
      db[x] += dz[i * d_group + x];
      for (std::size_t m = 0; m < d_model; ++m) {
        dh[i * d_model + m] += dz[i * d_group + x] * w[m * d_group + x];
        dw[m * d_group + x] += h[i * d_model + m] * dz[i * d_group + x];
      }
    }
  const auto wide = [](const matrix& x) {
    return values(x.begin(), x.end());
  };
  return {wide(dh), wide(dw), wide(db), wide(dc), wide(dz)};
}

double largest_difference(const values& a, const values& b) {
  double largest = a.size() == b.size() ? 0 : infinity;
  for (std::size_t x = 0; x < a.size() && x < b.size(); ++x) {
    const double difference = std::abs(a[x] - b[x]);
    largest = difference <= largest ? largest : difference;  // NaN is kept
  }
  return largest;
}

/// Gradients in G of hidden states in H, a router in T and dscores in DS: what is wrong, or
/// nothing.
template <class G, class H, class T, class DS>
std::string check_values(const router_case& c) {
  const router_problem<H, T> p(c);
  const guarded_tensor<DS, 2> ds = make_dscores<DS>(c);
  const gradients<G> to = backward<G>(p, ds);
  if (!to.guards_hold()) return "memory outside the extents was written";
  const dense_router dense(p);
  const std::vector<values> got = to.all(), expected = dense.gradient(ds.values()),
                            naive = naive_gradient(dense, ds.values());
  using sums =
      std::common_type_t<focus::detail::centroid_accumulator<H, T>, focus::accumulator_t<DS>>;
  // Of terms that cancel, rounding errors remain: those of dZ, across which its token and W_g lie.
  const double dz = largest_magnitude(naive[4]);
  const double terms[] = {dz * largest_magnitude(dense.w), dz * largest_magnitude(dense.h), dz, 0};
  for (std::size_t output = 0; output < got.size(); ++output) {
    const double magnitude = (std::max)(largest_magnitude(expected[output]), terms[output]);
    const double of_sums = std::is_same_v<sums, float>
                               ? 2 * largest_difference(naive[output], expected[output])
                               : 1e-12 * (1 + magnitude);
    const double tolerance = of_sums + (4 * epsilon<sums>() + epsilon<G>()) * magnitude;
    const double error = largest_difference(got[output], expected[output]);
    if (!(error <= tolerance))
      return "gradient " + std::to_string(output) + " differs by " +
             std::to_string(error / tolerance) + " tolerances";
  }
  return {};
}

struct small_router {
  std::vector<float> h{1, 2, 0, 0}, w{1, 0, 0, 2}, c{1, 0, 3, 4, 0, 0}, b{-1, -1};
  std::vector<float> ds{1, 2, 3, 4, 5, 6};
  std::vector<float> dh = std::vector<float>(4, 99.0f), dw = dh, dc = std::vector<float>(6, 99.0f),
                     db = std::vector<float>(2, 99.0f);
  focus::centroid_params<float> params{{w.data(), {2, 2}}, {c.data(), {3, 2}}};
  focus::matrix_view<const float> hidden_view{h.data(), {2, 2}}, dscores_view{ds.data(), {2, 3}};
  focus::matrix_view<float> dhidden_view{dh.data(), {2, 2}}, dprojection_view{dw.data(), {2, 2}},
      dcentroids_view{dc.data(), {3, 2}};
  std::span<float> dbias_view{db};

  small_router() = default;
  small_router(const small_router&) = delete;
  void run() {
    focus::centroid_scores_backward(hidden_view, params, dscores_view, dhidden_view,
                                    dprojection_view, dbias_view, dcentroids_view);
  }
  std::string refusal_of(const std::string& argument) {
    const std::string textbook = refusal(argument, [&] {
      focus::reference::centroid_scores_backward(hidden_view, params, dscores_view, dhidden_view,
                                                 dprojection_view, dbias_view, dcentroids_view);
    });
    return textbook.empty() ? refusal(argument, [&] { run(); }) : textbook;
  }
  bool untouched() const {
    return dh == std::vector<float>(4, 99.0f) && dw == dh && dc == std::vector<float>(6, 99.0f) &&
           db == std::vector<float>(2, 99.0f) && h == std::vector<float>{1, 2, 0, 0} &&
           ds == std::vector<float>{1, 2, 3, 4, 5, 6};
  }
};

}  // namespace

TEST_CASE("centroid_scores_backward: central differences, the textbook and the kernels in double") {
  for (const index_t n : {1, 7, 300})
    for (const index_t groups : {1, 2, 8, 64})
      for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine})
        for (const bool with_bias : {false, true}) {
          const router_case spec{.n = n,
                                 .d_model = 12,
                                 .d_group = 5,
                                 .groups = groups,
                                 .metric = metric,
                                 .with_bias = with_bias};
          INFO(describe(spec));
          const router_problem<double, double> p(spec);
          const guarded_tensor<double, 2> ds = make_dscores<double>(spec);
          const values dscores = ds.values();
          const dense_router at(p);
          const std::vector<values> kernel = backward<double>(p, ds).all();
          const std::vector<values> textbook = at.gradient(dscores);
          generator random(9);
          for (std::size_t output = 0; output < 4; ++output)
            for (int r = 0; r < 8; ++r) {
              // One element, or all of them, of one input.
              values direction(kernel[output].size());
              if (r < 4)
                direction[static_cast<std::size_t>(
                    random.below(static_cast<index_t>(direction.size())))] = 1;
              else
                for (double& x : direction) x = random.normal();
              const auto loss = [&](double distance) {
                dense_router moved = at;
                if (moved.b.empty()) moved.b.assign(static_cast<std::size_t>(spec.d_group), 0.0);
                values* const inputs[] = {&moved.h, &moved.w, &moved.b, &moved.c};
                for (std::size_t x = 0; x < direction.size(); ++x)
                  (*inputs[output])[x] += distance * direction[x];
                return moved.loss(dscores);
              };
              double squares = 0, length = 0;
              for (std::size_t x = 0; x < direction.size(); ++x) {
                squares += textbook[output][x] * textbook[output][x];
                length += direction[x] * direction[x];
              }
              // A short projected token turns fast: steps small beside the shortest.
              const double step = 1e-4 / std::sqrt(length);
              const double expected =
                  (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) /
                  (12 * step);
              double by_kernel = 0, by_textbook = 0;
              for (std::size_t x = 0; x < direction.size(); ++x) {
                by_kernel += kernel[output][x] * direction[x];
                by_textbook += textbook[output][x] * direction[x];
              }
              const double tolerance = 1e-7 * std::sqrt(squares * length) + 1e-9;
              CHECK(std::abs(by_kernel - expected) <= tolerance);
              CHECK(std::abs(by_textbook - expected) <= tolerance);
            }
        }
}

TEST_CASE("centroid_scores_backward: the textbook's values, as close as the naive form in float") {
  for (const router_case& c : router_cases()) {
    INFO(describe(c));
    CHECK(check_values<float, float, float, float>(c) == "");
    CHECK(check_values<double, double, double, double>(c) == "");
    CHECK(check_values<float, focus::bfloat16, focus::bfloat16, float>(c) == "");
  }
}

TEST_CASE("centroid_scores_backward: any mix of storage types") {
  for (const index_t d_model : {7, 300})
    for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine}) {
      const router_case c{
          .n = 23, .d_model = d_model, .d_group = 17, .metric = metric, .with_bias = true};
      INFO(describe(c));
      CHECK(check_values<focus::bfloat16, focus::bfloat16, float, float>(c) == "");
      CHECK(check_values<float, focus::float16, focus::bfloat16, focus::bfloat16>(c) == "");
      CHECK(check_values<engine_float, engine_bfloat16, engine_float, engine_float>(c) == "");
      CHECK(check_values<double, float, double, float>(c) == "");
      CHECK(check_values<float, float, float, double>(c) == "");
    }
}

TEST_CASE("centroid_scores_backward: more tokens, and wider ones, than a task takes") {
  for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine}) {
    const router_case long_one{.n = 5000, .d_model = 20, .groups = 64, .metric = metric};
    CHECK(check_values<float, float, float, float>(long_one) == "");
    const router_case wide_one{.n = 600, .d_model = 800, .groups = 20, .metric = metric};
    CHECK(check_values<float, float, float, float>(wide_one) == "");
  }
}

TEST_CASE("centroid_scores_backward: each output by itself has the bits that it has among all") {
  for (const index_t n : {0, 1, 20})
    for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine}) {
      const router_case c{.n = n, .d_group = 17, .metric = metric, .with_bias = true};
      const router_problem<float, float> p(c);
      const guarded_tensor<float, 2> ds = make_dscores<float>(c);
      const gradients<float> all = backward<float>(p, ds);
      for (unsigned outputs = 0; outputs <= everything; ++outputs) {
        const gradients<float> some = backward<float>(p, ds, outputs);
        const auto as_wanted = [&](unsigned output, const auto& got, const auto& full) {
          return (outputs & output) != 0 ? got.same_bits(full) : got.untouched();
        };
        CHECK(as_wanted(hidden, some.dhidden, all.dhidden));
        CHECK(as_wanted(projection, some.dprojection, all.dprojection));
        CHECK(as_wanted(bias, some.dbias, all.dbias));
        CHECK(as_wanted(centroids, some.dcentroids, all.dcentroids));
      }
    }
  // As a caller writes it.
  small_router r;
  focus::centroid_scores_backward(r.hidden_view, r.params, r.dscores_view, {}, {}, {}, {});
  CHECK(r.untouched());
  focus::centroid_scores_backward(r.hidden_view, r.params, r.dscores_view, {}, {}, r.db, {});
  CHECK(r.db == std::vector<float>{26, 28});
  focus::reference::centroid_scores_backward(r.hidden_view, r.params, r.dscores_view, {}, {}, r.db,
                                             {});
  CHECK(r.db == std::vector<float>{26, 28});
}

TEST_CASE("centroid_scores_backward: by hand") {
  small_router r;
  r.run();
  // z = [1 4] and [0 0]; dz = ds C = [7 8] and [19 20]
  CHECK(r.dh == std::vector<float>{7, 16, 19, 40});
  CHECK(r.dw == std::vector<float>{7, 8, 14, 16});
  CHECK(r.db == std::vector<float>{26, 28});
  CHECK(r.dc == std::vector<float>{1, 4, 2, 8, 3, 12});
}

TEST_CASE("centroid_scores_backward: cosines by hand, and vectors of length 0") {
  small_router r;
  r.params.metric = focus::similarity::cosine;
  r.run();
  // The unit vectors of the centroids are [1 0], [3 4] / 5 and [0 0]: dz-hat = [2.2 1.6] for token
  // 0, whose z = [1 4] is sqrt(17) long. Across z it is (2.2 * 4 - 1.6) / 17 [4 -1]; token 1 is 0.
  const double across = (2.2 * 4 - 1.6) / 17 / std::sqrt(17.0);
  CHECK(r.dh[0] == Approx(4 * across).epsilon(1e-5));
  CHECK(r.dh[1] == Approx(-2 * across).epsilon(1e-5));
  CHECK(r.dh[2] == 0);
  CHECK(r.dh[3] == 0);
  CHECK(r.db[0] == Approx(4 * across).epsilon(1e-5));
  CHECK(r.db[1] == Approx(-across).epsilon(1e-5));
  // dc_0 = 1 [1 4] / sqrt(17) across [1 0]; of length 1 already.
  CHECK(std::abs(r.dc[0]) < 1e-6);
  CHECK(r.dc[1] == Approx(4 / std::sqrt(17.0)).epsilon(1e-6));
  // dc_1 = 2 [1 4] / sqrt(17) across [3 4] / 5, by 5: the part along [-4 3] / 5.
  const double part = 2 * (-4 + 12) / 5.0 / std::sqrt(17.0) / 5;
  CHECK(r.dc[2] == Approx(-0.8 * part).epsilon(1e-5));
  CHECK(r.dc[3] == Approx(0.6 * part).epsilon(1e-5));
  CHECK(r.dc[4] == 0);
  CHECK(r.dc[5] == 0);
}

TEST_CASE("centroid_scores_backward: NaN in a token is NaN in its gradient, whatever the width") {
  for (const index_t width : {1, 4, 8, 12, 16, 20, 33}) {
    INFO(width);
    const auto size = static_cast<std::size_t>(width);
    const std::vector<float> hidden{1.0f, static_cast<float>(oracle::not_a_number)};
    const std::vector<float> projection(size, 0.5f), centroids(size, 1.0f), dscores{1.0f, 1.0f};
    std::vector<float> dhidden{7.0f, 7.0f};
    focus::centroid_scores_backward(
        focus::matrix_view<const float>(hidden.data(), {2, 1}),
        focus::centroid_params<float>{.projection = {projection.data(), {1, width}},
                                      .centroids = {centroids.data(), {1, width}},
                                      .metric = focus::similarity::cosine},
        focus::matrix_view<const float>(dscores.data(), {2, 1}),
        focus::matrix_view<float>(dhidden.data(), {2, 1}), {}, {}, {});
    CHECK(std::isfinite(dhidden[0]));
    CHECK(std::isnan(dhidden[1]));
  }
}

TEST_CASE("centroid_scores_backward: cosines of very long and very short vectors") {
  small_router one;
  one.params.metric = focus::similarity::cosine;
  one.h = {1, 2, -1, 1};
  one.run();
  for (const float magnitude : {1e-30f, 1e-20f, 1e20f, 1e30f}) {
    small_router r;
    r.params.metric = focus::similarity::cosine;
    r.h = {magnitude, 2 * magnitude, -magnitude, magnitude};
    r.run();
    // The longer the vector, the less it turns.
    for (std::size_t x = 0; x < 4; ++x)
      CHECK(r.dh[x] * magnitude == Approx(one.dh[x]).epsilon(1e-5));
    for (std::size_t x = 0; x < 6; ++x) CHECK(r.dc[x] == Approx(one.dc[x]).epsilon(1e-5));
  }
}

TEST_CASE("centroid_scores_backward: the same bits for any number of threads") {
  for (router_case c : router_cases()) {
    INFO(describe(c));
    if (c.n == 200) c.n = 1100, c.d_model = 800;
    const router_problem<float, float> p(c);
    const guarded_tensor<float, 2> ds = make_dscores<float>(c);
    const gradients<float> one = backward<float>(p, ds);
    for (const int threads : {1, 2, 3})
      CHECK(backward<float>(p, ds, everything, thread_executor(threads)).same_bits(one));
  }
}

TEST_CASE("centroid_scores_backward: dhidden of a token depends on that token alone") {
  for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine}) {
    const router_case c{.n = 100, .metric = metric};
    router_problem<float, float> p(c);
    guarded_tensor<float, 2> ds = make_dscores<float>(c);
    const gradients<float> all = backward<float>(p, ds);
    std::vector<float> alone(static_cast<std::size_t>(c.d_model));
    for (index_t i = 0; i < c.n; ++i) {
      focus::centroid_scores_backward(
          focus::matrix_view<const float>(p.hidden.view().row(i), {1, c.d_model}), p.params(),
          focus::matrix_view<const float>(ds.view().row(i), {1, c.groups}),
          focus::matrix_view<float>(alone.data(), {1, c.d_model}), {}, {}, {});
      REQUIRE(std::memcmp(alone.data(), all.dhidden.view().row(i), alone.size() * 4) == 0);
    }
    // NaN in one token reaches that row, and the gradients of what all tokens share.
    ds.view()(40, 3) = static_cast<float>(not_a_number);
    gradients<float> poisoned = backward<float>(p, ds);
    for (index_t i = 0; i < c.n; ++i)
      for (index_t m = 0; m < c.d_model; ++m)
        if (i == 40)
          CHECK(std::isnan(poisoned.dhidden.view()(i, m)));
        else
          CHECK(poisoned.dhidden.view()(i, m) == all.dhidden.view()(i, m));
    for (const double x : poisoned.dprojection.values()) CHECK(std::isnan(x));
    // An element of H reaches its row of the projection's gradient alone, where scores are
    // products.
    if (metric != focus::similarity::dot) continue;
    ds = make_dscores<float>(c);
    p.hidden.view()(40, 5) = static_cast<float>(not_a_number);
    poisoned = backward<float>(p, ds);
    CHECK(poisoned.dhidden.same_bits(all.dhidden));
    for (index_t m = 0; m < c.d_model; ++m)
      for (index_t x = 0; x < c.d_group; ++x)
        if (m == 5)
          CHECK(std::isnan(poisoned.dprojection.view()(m, x)));
        else
          CHECK(poisoned.dprojection.view()(m, x) == all.dprojection.view()(m, x));
  }
}

TEST_CASE("centroid_scores_backward: no tokens give zeros, with null pointers") {
  for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine}) {
    small_router r;
    r.params.metric = metric;
    r.hidden_view = {nullptr, {0, 2}};
    r.dscores_view = {nullptr, {0, 3}};
    r.dhidden_view = {nullptr, {0, 2}};
    r.run();
    CHECK(r.dw == std::vector<float>(4, 0.0f));
    CHECK(r.db == std::vector<float>(2, 0.0f));
    CHECK(r.dc == std::vector<float>(6, 0.0f));
  }
}

TEST_CASE("centroid_scores_backward: widths of 0") {
  small_router r;
  r.hidden_view = {nullptr, {2, 0}};
  r.params.projection = {nullptr, {0, 2}};
  r.params.bias = r.b;
  r.dhidden_view = {nullptr, {2, 0}};
  r.dprojection_view = {nullptr, {0, 2}};
  r.run();
  CHECK(r.db == std::vector<float>{26, 28});
  CHECK(r.dc == std::vector<float>{-5, -5, -7, -7, -9, -9});
  small_router s;
  s.params.projection = {nullptr, {2, 0}};
  s.params.centroids = {nullptr, {3, 0}};
  s.dprojection_view = {nullptr, {2, 0}};
  s.dcentroids_view = {nullptr, {3, 0}};
  s.dbias_view = {};
  s.run();
  CHECK(s.dh == std::vector<float>(4, 0.0f));
}

TEST_CASE("centroid_scores_backward: allocates nothing when lent a workspace that served before") {
  const router_case c{.n = 3000, .metric = focus::similarity::cosine, .with_bias = true};
  const router_problem<float, float> p(c);
  const guarded_tensor<float, 2> ds = make_dscores<float>(c);
  gradients<float> to(c);
  focus::workspace ws;
  const auto run = [&] {
    focus::centroid_scores_backward(p.hidden.view(), p.params(), ds.view(), to.dhidden.view(),
                                    to.dprojection.view(), to.bias_span(), to.dcentroids.view(),
                                    focus::with_workspace(focus::serial_executor{}, ws));
  };
  CHECK(allocations_of(run) == 1);
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("centroid_scores_backward: bad arguments are refused before anything is written") {
  small_router r;
  SECTION("hidden and the router") {
    r.hidden_view = {r.h.data(), {2, 1}, {2, 1}};
    CHECK(r.refusal_of("hidden") == "");
    r.hidden_view = {r.h.data(), {2, 2}};
    r.params.projection = {nullptr, {2, 2}};
    CHECK(r.refusal_of("params.projection") == "");
    r.params.projection = {r.w.data(), {2, 2}};
    r.params.centroids = {r.c.data(), {6, 1}};
    CHECK(r.refusal_of("params.centroids") == "");
    r.params.centroids = {r.c.data(), {3, 2}};
    r.params.bias = std::span(r.b).first(1);
    CHECK(r.refusal_of("params.bias") == "");
  }
  SECTION("dscores") {
    r.dscores_view = {r.ds.data(), {3, 2}};
    CHECK(r.refusal_of("dscores") == "");
    r.dscores_view = {nullptr, {2, 3}};
    CHECK(r.refusal_of("dscores") == "");
  }
  SECTION("shapes of the outputs") {
    r.dhidden_view = {r.dh.data(), {2, 1}};
    CHECK(r.refusal_of("dhidden") == "");
    r.dhidden_view = {nullptr, {2, 2}};
    CHECK(r.refusal_of("dhidden") == "");
    r.dhidden_view = {r.dh.data(), {2, 2}, {1, 1}};
    CHECK(r.refusal_of("dhidden") == "");
    r.dhidden_view = {};
    r.dprojection_view = {r.dw.data(), {4, 1}};
    CHECK(r.refusal_of("dprojection") == "");
    r.dprojection_view = {r.dw.data(), {2, 2}, {0, 1}};
    CHECK(r.refusal_of("dprojection") == "");
    r.dprojection_view = {};
    r.dbias_view = std::span(r.db).first(1);
    CHECK(r.refusal_of("dbias") == "");
    r.dbias_view = {};
    r.dcentroids_view = {r.dc.data(), {2, 3}};
    CHECK(r.refusal_of("dcentroids") == "");
    r.dcentroids_view = {nullptr, {3, 2}};
    CHECK(r.refusal_of("dcentroids") == "");
  }
  SECTION("overlap with an input") {
    for (std::vector<float>* input : {&r.h, &r.w, &r.c, &r.ds}) {
      r.dhidden_view = {input->data(), {2, 2}};
      CHECK(r.refusal_of("dhidden") == "");
      r.dhidden_view = {};
      r.dprojection_view = {input->data(), {2, 2}};
      CHECK(r.refusal_of("dprojection") == "");
      r.dprojection_view = {};
      r.dbias_view = std::span(*input).first(2);
      CHECK(r.refusal_of("dbias") == "");
      r.dbias_view = {};
    }
    r.params.bias = r.b;
    r.dbias_view = r.b;
    CHECK(r.refusal_of("dbias") == "");
    r.dbias_view = {};
    r.dcentroids_view = {r.ds.data(), {3, 2}};
    CHECK(r.refusal_of("dcentroids") == "");
  }
  SECTION("overlap of two outputs") {
    r.dprojection_view = r.dhidden_view;
    CHECK(r.refusal_of("dprojection") == "");
    r.dprojection_view = {};
    r.dbias_view = std::span(r.dh).last(2);
    CHECK(r.refusal_of("dbias") == "");
    r.dbias_view = std::span(r.dc).last(2);
    CHECK(r.refusal_of("dcentroids") == "");
    r.dbias_view = {};
    r.dhidden_view = {r.dc.data() + 2, {2, 2}};
    CHECK(r.refusal_of("dcentroids") == "");
  }
  CHECK(r.untouched());
}

TEST_CASE("centroid_scores_backward: an exception of the executor's reaches the caller") {
  const router_case c{.n = 10};
  const router_problem<float, float> p(c);
  const guarded_tensor<float, 2> ds = make_dscores<float>(c);
  CHECK_THROWS_AS(backward<float>(p, ds, everything, throwing_executor{}),
                  throwing_executor::error);
}

}  // namespace test_centroids_backward
