// A safetensors file of any bytes: its tensors, and the router that it may hold.

#include <cstdint>
#include <span>

#include "memory_file.hpp"
#include "require.hpp"
#include "router_file.hpp"
#include "safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace language_model;
  const memory_file content({data, size});
  may_refuse(content.path(), [&] {
    const safetensors_file file(content.path());
    for (const auto& entry : file.tensors())
      may_refuse(content.path(), [&] { (void)file.floats(entry.first); });
  });
  model_config config{};
  config.layers = 1;
  config.d_model = 2;
  may_refuse(content.path(), [&] { load_router(content.path(), config); });
  return 0;
}
