// expected error: concurrency
#include <focus/attention.hpp>

struct pool {
#if !defined(FOCUS_TEST_MISUSE)
  focus::index_t concurrency() const {
    return 1;
  }
#endif
  template <class F>
  void parallel_for(focus::index_t tasks, F&& body) {
    for (focus::index_t task = 0; task < tasks; ++task) body(task, focus::index_t{0});
  }
};

void attend(focus::tensor_view<const float, 3> q, focus::tensor_view<float, 3> out) {
  focus::attention(q, q, q, out, focus::full_causal, {}, {}, pool{});
}
