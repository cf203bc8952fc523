// expected error: mutable_tensor_like
#include <focus/attention.hpp>

#if defined(FOCUS_TEST_MISUSE)
using output = focus::tensor_view<const float, 3>;
#else
using output = focus::tensor_view<float, 3>;
#endif

void attend(focus::tensor_view<const float, 3> q, output out) {
  focus::attention(q, q, q, out);
}
