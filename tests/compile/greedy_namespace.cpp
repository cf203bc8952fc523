// A user's namespace whose function templates take anything under each name that the library calls,
// with a storage type, tensors, spans and an executor in it: unqualified calls inside the library
// would be ambiguous, or go there.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>

#include <focus/focus.hpp>
#include <focus/reference.hpp>

#include "every_function.hpp"

namespace engine {

#include "greedy_names.hpp"

struct engine_half {
  std::uint16_t bits_of_engine = 0;
};

template <class View>
struct engine_tensor {
  View view_of_engine;
};

template <class T>
struct engine_span {
  std::span<T> span_of_engine;
  T* data() const { return span_of_engine.data(); }
  std::size_t size() const { return span_of_engine.size(); }
};

struct engine_executor {
  static focus::index_t concurrency() { return 1; }
  template <class F>
  void parallel_for(focus::index_t tasks, F&& body) const {
    for (focus::index_t task = 0; task < tasks; ++task) body(task, focus::index_t{0});
  }
};

struct engine_wrap {
  template <class T, int Rank>
  engine_tensor<focus::tensor_view<T, Rank>> operator()(focus::tensor_view<T, Rank> view) const {
    return {view};
  }
  template <class T>
  engine_span<T> operator()(std::span<T> span) const {
    return {span};
  }
};

}  // namespace engine

template <>
struct focus::scalar_traits<engine::engine_half> {
  using accumulator = float;
  static constexpr focus::storage_format format = focus::storage_format::bfloat16;
  static float to_accumulator(engine::engine_half x) {
    return focus::scalar_traits<focus::bfloat16>::to_accumulator(focus::bfloat16(x.bits_of_engine));
  }
  static engine::engine_half from_accumulator(float x) {
    return {focus::scalar_traits<focus::bfloat16>::from_accumulator(x).bits};
  }
};

template <class View>
struct focus::tensor_traits<engine::engine_tensor<View>> {
  static View view(const engine::engine_tensor<View>& x) { return x.view_of_engine; }
};

int main() {
  const double kept =
      every_function::call<engine::engine_half>(engine::engine_executor{}, engine::engine_wrap{});
  std::printf("%g\n", kept);
  return kept > 0 ? 0 : 1;
}
