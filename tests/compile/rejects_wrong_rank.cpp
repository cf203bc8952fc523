// expected error: tensor_like
#include <focus/attention.hpp>

#if defined(FOCUS_TEST_MISUSE)
constexpr int rank = 2;
#else
constexpr int rank = 3;
#endif

void attend(focus::tensor_view<const float, rank> q, focus::tensor_view<const float, 3> kv,
            focus::tensor_view<float, 3> out) {
  focus::attention(q, kv, kv, out);
}
