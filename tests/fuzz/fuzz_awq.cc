// Fuzzes the decoding of arbitrary inline AWQ tensors: every dtype, shape and length.
//
// Input: group size, flags, then per tensor a dtype, a rank and dimensions; the rest is their data.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "kernels/formats/format.h"

namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

// Takes bytes off the front of the input; zeros once it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Small mostly, since equal dimensions must meet for a decode; sometimes huge or negative.
  int64_t Dimension() {
    const uint8_t byte = Byte();
    if (byte < 0xf0) return byte;
    return static_cast<int64_t>(uint64_t{Byte()} << (8 * (byte & 7)));
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

constexpr const char* kDtypes[] = {"I32", "F16", "BF16", "F32", "U8"};
constexpr int64_t kMaxBytes = 1 << 16;

// Bytes that fit the shape where that is small, so that decoding gets past the first check.
int64_t FittingBytes(const awqd::TensorView& tensor) {
  int64_t bytes = tensor.dtype == "I32" || tensor.dtype == "F32" ? 4 : tensor.dtype == "U8" ? 1 : 2;
  for (int64_t dim : tensor.shape) {
    if (dim <= 0 || dim > kMaxBytes / bytes) return 0;
    bytes *= dim;
  }
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  awqd::QuantConfig config = {.quant_method = "awq", .version = "gemm"};
  config.group_size = static_cast<int8_t>(in.Byte());
  const uint8_t flags = in.Byte();
  config.bits = flags & 1 ? 4 : flags >> 4;
  config.zero_point = (flags & 2) == 0;
  std::vector<std::vector<uint8_t>> storage;
  storage.reserve(4);
  awqd::LinearTensors tensors;
  const awqd::Format& format = *awqd::AllFormats().front();
  for (absl::string_view suffix : format.suffixes) {
    const uint8_t head = in.Byte();
    if (head & 0x80) continue;
    awqd::TensorView tensor;
    tensor.dtype = kDtypes[head % 5];
    for (int rank = head >> 4 & 3; rank > 0; --rank) tensor.shape.push_back(in.Dimension());
    storage.emplace_back(std::max<int64_t>(0, FittingBytes(tensor) + (head & 8 ? 1 : 0)));
    for (size_t i = 0; i < std::min<size_t>(storage.back().size(), 64); ++i) {
      storage.back()[i] = in.Byte();
    }
    tensor.bytes = storage.back();
    tensors.emplace(std::string(suffix), tensor);
  }
  const auto weight = format.decode(config, tensors);
  if (weight.ok()) {
    Require(awqd::Validate(*weight).ok());
    for (uint8_t zero : weight->zeros) Require(zero < 16);
    Require(weight->Code(weight->k - 1, weight->n - 1) < 16);
  } else {
    Require(weight.status().code() == absl::StatusCode::kInvalidArgument);
  }
  return 0;
}
