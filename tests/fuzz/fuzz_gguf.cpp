// A GGUF file of any bytes: its tensors, and the model and the tokenizer that it may hold.

#include <cstdint>
#include <span>
#include <vector>

#include "gguf.hpp"
#include "memory_file.hpp"
#include "model.hpp"
#include "require.hpp"
#include "tokenizer.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace language_model;
  const memory_file content({data, size});
  may_refuse(content.path(), [&] {
    const gguf_file file(content.path());
    for (const auto& [name, tensor] : file.tensors()) {
      std::vector<float> elements(tensor.elements);
      dequantize(tensor.type, tensor.data, elements);
    }
    may_refuse(content.path(), [&] { tokenizer{file}; });
    may_refuse(content.path(), [&] { model{file}; });
  });
  return 0;
}
