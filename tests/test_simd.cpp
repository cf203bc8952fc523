// The vector layer in use: each operation lane by lane, and the exponentials in units in the last
// place.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_simd {
namespace {

using focus::index_t;
using focus::detail::is_equal;
using focus::detail::vec;
using oracle::generator;

template <class A>
constexpr std::size_t width = static_cast<std::size_t>(vec<A>::width);
template <class A>
using lanes = std::array<A, width<A>>;

template <class A>
lanes<A> lanes_of(vec<A> x) {
  lanes<A> out;
  x.store(out.data());
  return out;
}
template <class A, class F>
lanes<A> make_lanes(F&& f) {
  lanes<A> x;
  for (std::size_t l = 0; l < x.size(); ++l) x[l] = static_cast<A>(f(l));
  return x;
}
template <class A>
vec<A> load(const lanes<A>& x) {
  return vec<A>::load(x.data());
}

/// Runs check(A{}) for both types of sums.
template <class F>
void for_both(F&& check) {
  check(float{});
  check(double{});
}

/// Wider than A: what the results are measured against.
template <class A>
using wide = std::conditional_t<std::is_same_v<A, float>, double, long double>;
template <class A>
constexpr bool can_measure =
    std::numeric_limits<wide<A>>::digits >= std::numeric_limits<A>::digits + 8;

/// What is promised of exp2. Without a fused multiply-add products are rounded before they are
/// added; a power that is looked up was rounded, too.
template <class A>
constexpr double exp2_ulps = !FOCUS_HAS_FMA                                           ? 1.3
                             : sizeof(A) == 4 && (FOCUS_HAS_AVX2 || FOCUS_HAS_AVX512) ? 1.2
                                                                                      : 1.01;

/// The error of `got` in units in the last place of the truth.
template <class A>
double ulp_error(A got, wide<A> truth) {
  constexpr int digits = std::numeric_limits<A>::digits;
  if (static_cast<wide<A>>(got) == truth) return 0;
  const int exponent = (std::max)(std::ilogb(truth), std::numeric_limits<A>::min_exponent - 1);
  return static_cast<double>(std::abs(static_cast<wide<A>>(got) - truth) /
                             std::ldexp(wide<A>{1}, exponent - digits + 1));
}

/// One row of the table: f against its truth, from `low` to `high`, evenly and near each end and
/// zero.
template <class A, class F, class Truth>
double largest_ulp_error(F&& f, Truth&& truth, A low, A high, int samples) {
  generator random(1);
  double largest = 0;
  lanes<A> x;
  std::size_t filled = 0;
  const auto measure = [&](A value) {
    x[filled++] = value;
    if (filled < x.size()) return;
    filled = 0;
    const lanes<A> y = lanes_of<A>(f(load<A>(x)));
    for (std::size_t l = 0; l < x.size(); ++l) {
      const double error = ulp_error<A>(y[l], truth(static_cast<wide<A>>(x[l])));
      largest = error <= largest ? largest : error;  // NaN counts as large
    }
  };
  for (int s = 0; s < samples; ++s) {
    measure(low + static_cast<A>(random.uniform()) * (high - low));
    // Small magnitudes of either sign, evenly in their exponents.
    const A small = static_cast<A>(std::exp2(-40 * random.uniform()));
    measure((std::clamp)(s % 2 ? small : -small, low, high));
    // Where the integer part changes: just around the halves.
    const A half = std::floor(low + static_cast<A>(random.uniform()) * (high - low)) + A(0.5);
    measure((std::clamp)(std::nextafter(half, s % 2 ? low : high), low, high));
    measure((std::clamp)(half, low, high));
  }
  for (std::size_t l = 0; l < x.size(); ++l) measure(l % 2 ? low : high);
  return largest;
}

}  // namespace

TEST_CASE("vec: load, store, broadcast and arithmetic") {
  for_both([]<class A>(A) {
    const auto a = make_lanes<A>([](std::size_t l) { return l + 1; });
    const auto b = make_lanes<A>([](std::size_t l) { return 0.5 * static_cast<double>(l) - 2; });
    CHECK(lanes_of<A>(load<A>(a)) == a);
    CHECK(lanes_of<A>(vec<A>::broadcast(3)) == make_lanes<A>([](std::size_t) { return 3; }));
    CHECK(lanes_of<A>(vec<A>::zero()) == lanes<A>{});
    const auto expect = [&](vec<A> got, auto&& f) {
      CHECK(lanes_of<A>(got) == make_lanes<A>([&](std::size_t l) { return f(a[l], b[l]); }));
    };
    expect(load<A>(a) + load<A>(b), [](A x, A y) { return x + y; });
    expect(load<A>(a) - load<A>(b), [](A x, A y) { return x - y; });
    expect(load<A>(a) * load<A>(b), [](A x, A y) { return x * y; });
    expect(load<A>(b) / load<A>(a), [](A x, A y) { return y / x; });
    expect(fma(load<A>(a), load<A>(b), vec<A>::broadcast(7)), [](A x, A y) { return x * y + 7; });
    expect(maximum(load<A>(a), load<A>(b)), [](A x, A y) { return x > y ? x : y; });
    expect(minimum(load<A>(a), load<A>(b)), [](A x, A y) { return x < y ? x : y; });
    expect(zero_where_less(load<A>(a), load<A>(b), vec<A>::zero()),
           [](A x, A y) { return y < 0 ? A{0} : x; });
  });
}

TEST_CASE("vec: max and min take the second where either is NaN") {
  for_both([]<class A>(A) {
    const vec<A> nan = vec<A>::broadcast(std::numeric_limits<A>::quiet_NaN()),
                 one = vec<A>::broadcast(1);
    for (const A x : lanes_of<A>(maximum(nan, one))) CHECK(x == 1);
    for (const A x : lanes_of<A>(minimum(nan, one))) CHECK(x == 1);
    for (const A x : lanes_of<A>(maximum(one, nan))) CHECK(std::isnan(x));
    for (const A x : lanes_of<A>(minimum(one, nan))) CHECK(std::isnan(x));
    for (const A x : lanes_of<A>(zero_where_less(one, nan, one))) CHECK(x == 1);
    for (const A x : lanes_of<A>(zero_where_less(nan, one, one))) CHECK(std::isnan(x));
  });
}

TEST_CASE("vec: round and scale_by_power") {
  for_both([]<class A>(A) {
    for (const A x :
         {A(0), A(-0.25), A(0.75), A(-0.75), A(1.25), A(-1.75), A(125.75), A(-126), A(1023)}) {
      const A got = lanes_of<A>(round(vec<A>::broadcast(x)))[0];
      CHECK(got == std::nearbyint(x));
    }
    CHECK(
        std::isnan(lanes_of<A>(round(vec<A>::broadcast(std::numeric_limits<A>::quiet_NaN())))[0]));
    constexpr int low = std::numeric_limits<A>::min_exponent - 1,
                  high = std::numeric_limits<A>::max_exponent - 1;
    bool exact = true;
    for (int n = low; n <= high; ++n) {
      const A got = lanes_of<A>(
          scale_by_power(vec<A>::broadcast(A(1.5)), vec<A>::broadcast(static_cast<A>(n))))[0];
      exact = exact && got == std::ldexp(A(1.5), n);
    }
    CHECK(exact);
    const A none = lanes_of<A>(
        scale_by_power(vec<A>::broadcast(A{1}), vec<A>::broadcast(static_cast<A>(low - 1))))[0];
    CHECK(none == 0);
    CHECK(!std::signbit(none));
  });
}

TEST_CASE("vec: sums and maxima over the lanes") {
  for_both([]<class A>(A) {
    const auto x = make_lanes<A>([](std::size_t l) { return static_cast<double>(1 << l) - 20; });
    double sum = 0;
    for (const A v : x) sum += static_cast<double>(v);
    CHECK(static_cast<double>(reduce_add(load<A>(x))) == sum);
    for (std::size_t at = 0; at < width<A>; ++at) {
      auto y = make_lanes<A>([](std::size_t l) { return -static_cast<double>(l) - 1; });
      y[at] = 5;
      CHECK(reduce_max(load<A>(y)) == 5);
      y[at] = std::numeric_limits<A>::quiet_NaN();
      CHECK(std::isnan(reduce_add(load<A>(y))));
    }
  });
}

TEST_CASE("vec: transpose") {
  for_both([]<class A>(A) {
    vec<A> rows[width<A>];
    for (std::size_t i = 0; i < width<A>; ++i)
      rows[i] = load<A>(make_lanes<A>([&](std::size_t j) { return 100 * i + j; }));
    focus::detail::transpose(rows);
    for (std::size_t i = 0; i < width<A>; ++i)
      CHECK(lanes_of<A>(rows[i]) == make_lanes<A>([&](std::size_t j) { return 100 * j + i; }));
  });
}

TEST_CASE("static_for counts at compile time") {
  int sum = 0;
  focus::detail::static_for<4>([&](auto i) {
    static_assert(i() >= 0 && i() < 4);
    sum = 10 * sum + i();
  });
  CHECK(sum == 123);
}

template <class A>
void check_edges() {
  constexpr index_t step = vec<A>::width;
  for (index_t count = step; count <= 5 * step; count += step)
    for (index_t begin = 0; begin <= count; ++begin)
      for (index_t end = begin; end <= count; ++end) {
        std::vector<A> row(static_cast<std::size_t>(count + 2), A{1});
        focus::detail::fill_edges(row.data() + 1, begin, end, count, A{7});
        bool right = is_equal(row.front(), A{1}) && is_equal(row.back(), A{1});
        for (index_t j = 0; j < count; ++j)
          right &=
              is_equal(row[static_cast<std::size_t>(j + 1)], j < begin || j >= end ? A{7} : A{1});
        if (!right) {
          INFO("begin " << begin << ", end " << end << ", count " << count);
          REQUIRE(right);
        }
      }
}

TEST_CASE("fill_edges: what is before begin and from end on, and nothing else") {
  check_edges<float>();
  check_edges<double>();
}

template <class A>
void check_hidden() {
  using focus::detail::hidden_keys;
  std::vector<focus::group_mask> keys;
  for (unsigned j = 0; j < 70; ++j) keys.push_back(j % 3 == 0 ? 0 : std::uint64_t{1} << j % 64);
  const focus::group_mask mask = 0xf0f0f0f0f0f0f0f1u;
  for (std::size_t count = 0; count < keys.size(); ++count) {
    std::vector<A> met(keys.size(), A{1}), disjoint = met;
    focus::detail::hide_by_groups<hidden_keys::meeting>(keys.data(), mask,
                                                        static_cast<index_t>(count), met.data());
    focus::detail::hide_by_groups<hidden_keys::disjoint>(
        keys.data(), mask, static_cast<index_t>(count), disjoint.data());
    bool right = true;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const bool meets = (keys[j] & mask) != 0, there = j < count;
      right &= is_equal(met[j], A{1}) == !(there && meets);
      right &= is_equal(disjoint[j], A{1}) == !(there && !meets);
    }
    CHECK(right);
  }
}

TEST_CASE("hide_by_groups: any number of keys, and nothing behind them") {
  check_hidden<float>();
  check_hidden<double>();
}

TEST_CASE("load_widened: each storage type, each count, nothing read behind the last element") {
  const auto check = []<class T>(T) {
    using A = focus::accumulator_t<T>;
    for (index_t count = 0; count <= vec<A>::width; ++count) {
      // Memory that ends with the last element, for the sanitizers to see.
      std::vector<T> memory;
      for (index_t l = 0; l < count; ++l)
        memory.push_back(oracle::narrowed<T>(0.5 * static_cast<double>(l) - 1));
      const lanes<A> got = lanes_of<A>(
          count == vec<A>::width ? focus::detail::load_widened(memory.data())
                                 : focus::detail::load_widened_partial(memory.data(), count));
      for (std::size_t l = 0; l < width<A>; ++l)
        CHECK(got[l] == (static_cast<index_t>(l) < count ? focus::detail::widen(memory[l]) : A{0}));
    }
  };
  check(float{}), check(double{}), check(focus::bfloat16{}), check(focus::float16{});
  check(oracle::engine_bfloat16{}), check(oracle::engine_float{});
}

TEST_CASE("load_widened: every 16-bit pattern as the scalar conversion gives it") {
  const auto check = []<class T>(T) {
    int wrong = 0;
    for (std::uint32_t first = 0; first < 0x10000u;
         first += static_cast<std::uint32_t>(width<float>)) {
      std::array<T, width<float>> x;
      for (std::size_t l = 0; l < x.size(); ++l) x[l].bits = static_cast<std::uint16_t>(first + l);
      const lanes<float> got = lanes_of<float>(focus::detail::load_widened(x.data()));
      for (std::size_t l = 0; l < x.size(); ++l) {
        const float expected = focus::detail::widen(x[l]);
        wrong += std::isnan(expected) ? !std::isnan(got[l])
                                      : std::bit_cast<std::uint32_t>(got[l]) !=
                                            std::bit_cast<std::uint32_t>(expected);
      }
    }
    CHECK(wrong == 0);
  };
  check(focus::bfloat16{});
  check(focus::float16{});
}

TEST_CASE("load_widened: into double from narrower types") {
  std::vector<float> memory(width<double>, 0.1f);
  for (const double x : lanes_of<double>(focus::detail::load_widened<float, double>(memory.data())))
    CHECK(x == static_cast<double>(0.1f));
}

TEST_CASE(
    "store_narrowed: each storage type, each count, nothing written behind the last element") {
  const auto check = []<class T>(T) {
    using A = focus::accumulator_t<T>;
    const auto x = make_lanes<A>([](std::size_t l) { return 1.0 / 3 - static_cast<double>(l); });
    for (index_t count = 0; count <= vec<A>::width; ++count) {
      oracle::guarded_tensor<T, 1> to({count}, oracle::layout::misaligned);
      focus::detail::store_narrowed(load<A>(x), to.view().data(), count);
      CHECK(to.guards_hold());
      for (index_t l = 0; l < count; ++l)
        CHECK(focus::detail::widen(to.view()(l)) ==
              focus::detail::widen(focus::detail::narrow<T>(x[static_cast<std::size_t>(l)])));
    }
  };
  check(float{}), check(double{}), check(focus::bfloat16{}), check(focus::float16{});
  check(oracle::engine_bfloat16{}), check(oracle::engine_float{});
}

TEST_CASE("store_narrowed: bfloat16 has the bits of the scalar conversion, wherever it rounds") {
  // Around each pattern and each border between two: of numbers, of subnormal ones, infinities and
  // NaN of either sign.
  const auto check = []<class T>(T) {
    constexpr std::uint32_t lower_halves[] = {0, 1, 0x3fff, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xffff};
    int wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern)
      for (std::size_t first = 0; first < std::size(lower_halves); first += width<float>) {
        const auto x = make_lanes<float>([&](std::size_t l) {
          return std::bit_cast<float>(pattern << 16 |
                                      lower_halves[(first + l) % std::size(lower_halves)]);
        });
        std::array<T, width<float>> got;
        focus::detail::store_narrowed(load<float>(x), got.data(), vec<float>::width);
        for (std::size_t l = 0; l < x.size(); ++l)
          wrong +=
              std::bit_cast<std::uint16_t>(got[l]) != focus::detail::float_to_bfloat16_bits(x[l]);
      }
    CHECK(wrong == 0);
  };
  check(focus::bfloat16{}), check(oracle::engine_bfloat16{});
}

TEST_CASE("exp2, sigmoid, tanh: errors in units in the last place") {
  for_both([]<class A>(A) {
    if constexpr (can_measure<A>) {
      using W = wide<A>;
      constexpr A lowest = focus::detail::exp2_lowest<A>, highest = focus::detail::exp2_highest<A>;
      constexpr int samples = 20000;
      const auto exp2 = [](vec<A> x) {
        return focus::detail::exp2<A>(x);
      };
      const auto true_exp2 = [](W x) {
        return std::exp2(x);
      };
      struct row {
        A low, high;
      };
      for (const auto [low, high] : {row{-1, 0}, row{-10, 0}, row{lowest, 0}, row{0, 1},
                                     row{0, highest}, row{lowest, highest}}) {
        INFO("exp2 from " << low << " to " << high);
        CHECK(largest_ulp_error<A>(exp2, true_exp2, low, high, samples) <= exp2_ulps<A>);
      }
      const auto sigmoid = [](vec<A> x) {
        return focus::detail::sigmoid<A>(x);
      };
      const auto true_sigmoid = [](W x) {
        return 1 / (1 + std::exp(-x));
      };
      // Beyond 1 an exponent is rounded before 2 is raised to it, by half a unit of its own.
      for (const auto [low, high, ulps] :
           {std::array<A, 3>{-1, 1, 3}, std::array<A, 3>{-1, 40, 3}, std::array<A, 3>{-10, 0, 16},
            std::array<A, 3>{-80, 0, 128}}) {
        INFO("sigmoid from " << low << " to " << high);
        CHECK(largest_ulp_error<A>(sigmoid, true_sigmoid, low, high, samples) <=
              static_cast<double>(ulps));
      }
      const auto tanh = [](vec<A> x) {
        return focus::detail::tanh<A>(x);
      };
      const auto true_tanh = [](W x) {
        return std::tanh(x);
      };
      for (const auto [low, high] :
           {row{A(-0.01), A(0.01)}, row{-1, 1}, row{-20, 20}, row{-1000, 1000}}) {
        INFO("tanh from " << low << " to " << high);
        CHECK(largest_ulp_error<A>(tanh, true_tanh, low, high, samples) <=
              (sizeof(A) == 4 ? 5 : 9));
      }
    }
  });
}

TEST_CASE("exp2: floats all over the last two octaves of the exponent's range") {
  double largest = 0;
  for (std::uint32_t bits = std::bit_cast<std::uint32_t>(-0.5f);
       bits <= std::bit_cast<std::uint32_t>(-2.0f);
       bits += 5 * static_cast<std::uint32_t>(width<float>)) {
    const auto x = make_lanes<float>(
        [&](std::size_t l) { return std::bit_cast<float>(bits + static_cast<std::uint32_t>(l)); });
    const lanes<float> y = lanes_of<float>(focus::detail::exp2<float>(load<float>(x)));
    // Every lane of a sparse subset is measured, all are bounded.
    largest = (std::max)(largest, ulp_error<float>(y[0], std::exp2(static_cast<double>(x[0]))));
    for (std::size_t l = 0; l < x.size(); ++l)
      if (!(y[l] > 0.2499f && y[l] < 0.7072f)) FAIL("2^" << x[l] << " = " << y[l]);
  }
  CHECK(largest <= exp2_ulps<float>);
}

TEST_CASE("exp2: a lane far above its range leaves the others as they are") {
  // Where a NaN hid a row's maximum, scores are measured from less. What 2^x is there is open, but
  // no sanitizer may object.
  for_both([]<class A>(A) {
    for (const A high : {A(200), A(3000), A(1e30), std::numeric_limits<A>::infinity()}) {
      const auto x =
          make_lanes<A>([&](std::size_t l) { return l == 0 ? high : -static_cast<A>(l); });
      const lanes<A> y = lanes_of<A>(focus::detail::exp2<A>(load<A>(x)));
      for (std::size_t l = 1; l < x.size(); ++l) CHECK(y[l] == std::exp2(x[l]));
    }
  });
}

TEST_CASE("exp2: exact at whole numbers, 0 where it cannot be normal, NaN stays") {
  for_both([]<class A>(A) {
    const auto exp2_of = [](A x) {
      return lanes_of<A>(focus::detail::exp2<A>(vec<A>::broadcast(x)))[0];
    };
    using limits = std::numeric_limits<A>;
    constexpr A lowest = focus::detail::exp2_lowest<A>, highest = focus::detail::exp2_highest<A>;
    bool exact = true;
    for (A n = lowest; n <= highest; n += 1) exact = exact && exp2_of(n) == std::exp2(n);
    CHECK(exact);
    CHECK(exp2_of(0) == 1);
    CHECK(exp2_of(-A{0}) == 1);
    CHECK(exp2_of(limits::denorm_min()) == 1);
    for (const A x : {lowest - 1, 2 * lowest, limits::lowest(), -limits::infinity()}) {
      CHECK(exp2_of(x) == 0);
      CHECK(!std::signbit(exp2_of(x)));
    }
    for (const A x :
         {std::nextafter(lowest, A{0}), std::nextafter(lowest, 2 * lowest), lowest - A(0.25),
          lowest - A(0.5), lowest - A(0.75), std::nextafter(lowest - 1, A{0})}) {
      INFO("2^" << x);
      CHECK(std::abs(exp2_of(x) - std::exp2(x)) < std::exp2(lowest));
      CHECK(!std::signbit(exp2_of(x)));
    }
    CHECK(std::isnan(exp2_of(limits::quiet_NaN())));
    CHECK(std::isnan(exp2_of(-limits::quiet_NaN())));
  });
}

#if FOCUS_HAS_AVX512
TEST_CASE("exp2_weight: within 2^-22, exact at 0, 0 where it cannot be normal, NaN stays") {
  // An approximation within 2^-23.5; the result is rounded, by up to 2^-24 of it; what the product
  // of f and the rest, at most as much, and f itself have lost to rounding is a third as much each.
  const auto weights_of = [](const lanes<float>& x) {
    return lanes_of<float>(focus::detail::exp2_weight(load<float>(x)));
  };
  double largest = 0;
  const auto measure = [&](const lanes<float>& x) {
    const lanes<float> y = weights_of(x);
    for (std::size_t l = 0; l < x.size(); ++l) {
      const double error = std::abs(y[l] / std::exp2(static_cast<double>(x[l])) - 1);
      largest = error <= largest ? largest : error;  // NaN counts as large
    }
  };
  generator random(1);
  for (int sample = 0; sample < 40000; ++sample) {
    measure(make_lanes<float>([&](std::size_t) { return -random.uniform(); }));
    measure(make_lanes<float>([&](std::size_t) { return -126 * random.uniform(); }));
    // Little below 0, and on either side of whole numbers.
    measure(make_lanes<float>([&](std::size_t) { return -std::exp2(-40 * random.uniform()); }));
    const float whole = -std::floor(static_cast<float>(125 * random.uniform()));
    measure(make_lanes<float>(
        [&](std::size_t l) { return std::nextafter(whole, l % 2 == 0 ? -200.0f : 1.0f); }));
  }
  CHECK(largest <= 0x1p-22);

  using limits = std::numeric_limits<float>;
  const auto weight_of = [&](float x) {
    return weights_of(make_lanes<float>([&](std::size_t) { return x; }))[0];
  };
  bool exact = true;
  for (float n = -126; n <= 3; n += 1) exact = exact && weight_of(n) == std::exp2(n);
  CHECK(exact);
  CHECK(weight_of(-0.0f) == 1);
  for (const float x :
       {std::nextafter(-126.0f, -127.0f), -127.0f, -1e30f, limits::lowest(), -limits::infinity()}) {
    CHECK(weight_of(x) == 0);
    CHECK(!std::signbit(weight_of(x)));
  }
  CHECK(std::isnan(weight_of(limits::quiet_NaN())));
  CHECK(std::isnan(weight_of(-limits::quiet_NaN())));
}
#endif

TEST_CASE("sigmoid and tanh: the ends, and NaN") {
  for_both([]<class A>(A) {
    using limits = std::numeric_limits<A>;
    const auto sigmoid_of = [](A x) {
      return lanes_of<A>(focus::detail::sigmoid<A>(vec<A>::broadcast(x)))[0];
    };
    const auto tanh_of = [](A x) {
      return lanes_of<A>(focus::detail::tanh<A>(vec<A>::broadcast(x)))[0];
    };
    CHECK(sigmoid_of(0) == A(0.5));
    CHECK(sigmoid_of(limits::infinity()) == 1);
    CHECK(sigmoid_of((limits::max)()) == 1);
    CHECK(sigmoid_of(limits::lowest()) < A(1e-37));
    CHECK(sigmoid_of(-limits::infinity()) < A(1e-37));
    CHECK(std::isnan(sigmoid_of(limits::quiet_NaN())));
    CHECK(tanh_of(0) == 0);
    for (const A x : {A(50), (limits::max)(), limits::infinity()}) {
      CHECK(tanh_of(x) == 1);
      CHECK(tanh_of(-x) == -1);
    }
    CHECK(std::isnan(tanh_of(limits::quiet_NaN())));
    for (const A tiny : {A(1e-30), A(-1e-20)})
      CHECK(std::abs(tanh_of(tiny) / tiny - 1) <= 4 * limits::epsilon());
  });
}

}  // namespace test_simd
