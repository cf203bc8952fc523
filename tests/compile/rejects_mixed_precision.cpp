// expected error: q, k, v and out must all be double, or all be types whose sums are float
#include <focus/attention.hpp>

#if defined(FOCUS_TEST_MISUSE)
using query = double;
#else
using query = focus::bfloat16;
#endif

void attend(focus::tensor_view<const query, 3> q, focus::tensor_view<const float, 3> kv,
            focus::tensor_view<float, 3> out) {
  focus::attention(q, kv, kv, out);
}
