// The element formats of GGUF tensors. A block is a scale (and an offset) in float16, then the
// block's quantised elements.

#include <cstring>

#include <focus/scalar.hpp>

#include "gguf.hpp"

namespace language_model {

namespace {

constexpr std::size_t block_elements = 32;

float half_at(const std::byte* bytes) {
  focus::float16 x;
  std::memcpy(&x.bits, bytes, sizeof x.bits);
  return focus::scalar_traits<focus::float16>::to_accumulator(x);
}

float brain_half_at(const std::byte* bytes) {
  focus::bfloat16 x;
  std::memcpy(&x.bits, bytes, sizeof x.bits);
  return focus::scalar_traits<focus::bfloat16>::to_accumulator(x);
}

/// 16 bytes of two 4-bit numbers each: the low halves are elements 0 to 15, the high halves 16
/// to 31.
void expand_nibbles(const std::byte* nibbles, float scale, float offset, float* out) {
  for (std::size_t j = 0; j < block_elements / 2; ++j) {
    out[j] =
        scale * static_cast<float>(std::to_integer<int>(nibbles[j] & std::byte{0x0f})) + offset;
    out[j + block_elements / 2] =
        scale * static_cast<float>(std::to_integer<int>(nibbles[j] >> 4)) + offset;
  }
}

void expand_block(tensor_type type, const std::byte* block, float* out) {
  switch (type) {
    case tensor_type::f32:
      std::memcpy(out, block, sizeof *out);
      break;
    case tensor_type::f16:
      *out = half_at(block);
      break;
    case tensor_type::bf16:
      *out = brain_half_at(block);
      break;
    case tensor_type::q8_0: {
      const float scale = half_at(block);
      for (std::size_t j = 0; j < block_elements; ++j)
        out[j] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + j]));
      break;
    }
    case tensor_type::q4_0: {
      const float scale = half_at(block);
      expand_nibbles(block + 2, scale, -8 * scale, out);
      break;
    }
    case tensor_type::q4_1:
      expand_nibbles(block + 4, half_at(block), half_at(block + 2), out);
      break;
  }
}

}  // namespace

block_layout layout_of(tensor_type type) {
  switch (type) {
    case tensor_type::f32:
      return {"F32", 1, 4};
    case tensor_type::f16:
      return {"F16", 1, 2};
    case tensor_type::bf16:
      return {"BF16", 1, 2};
    case tensor_type::q8_0:
      return {"Q8_0", block_elements, 2 + block_elements};
    case tensor_type::q4_0:
      return {"Q4_0", block_elements, 2 + block_elements / 2};
    case tensor_type::q4_1:
      return {"Q4_1", block_elements, 4 + block_elements / 2};
  }
  throw std::invalid_argument("layout_of: no such tensor_type");
}

void dequantize(tensor_type type, std::span<const std::byte> blocks, std::span<float> out) {
  const block_layout layout = layout_of(type);
  const std::byte* block = blocks.data();
  for (std::size_t i = 0; i < out.size(); i += layout.elements, block += layout.bytes)
    expand_block(type, block, out.data() + i);
}

}  // namespace language_model
