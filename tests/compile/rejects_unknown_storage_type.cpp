// expected error: scalar
#include <focus/attention.hpp>

struct engine_half {
  unsigned short bits;
};

#if !defined(FOCUS_TEST_MISUSE)
template <>
struct focus::scalar_traits<engine_half> {
  using accumulator = float;
  static float to_accumulator(engine_half x) {
    return scalar_traits<float16>::to_accumulator({x.bits});
  }
  static engine_half from_accumulator(float x) {
    return {scalar_traits<float16>::from_accumulator(x).bits};
  }
};
#endif

void attend(focus::tensor_view<const engine_half, 3> q, focus::tensor_view<engine_half, 3> out) {
  focus::attention(q, q, q, out);
}
