// Calls of libawqd, whose kernels are hidden from those that the bench is linked with.
#include "tests/bench/library.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "kernels/library/awqd.h"
#include "tests/bench/cases.h"

namespace awqd::bench {
namespace {

using testing::DevicePtr, testing::StackPtr, testing::WeightPtr;

void CheckCode(int code) {
  if (code != AWQD_OK) Fail(absl::StrCat("libawqd: ", awqd_error_message()));
}

int32_t ToLibrary(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return AWQD_FP16;
    case DType::kBf16:
      return AWQD_BF16;
    case DType::kFp32:
      return AWQD_FP32;
    case DType::kInt8:
      return AWQD_INT8;
    case DType::kInt32:
      return AWQD_INT32;
    default:
      Fail(absl::StrCat("libawqd: got matrices of ", Name(dtype)));
  }
}

int32_t ToLibrary(ActivationQuantization how) {
  switch (how) {
    case ActivationQuantization::kNone:
      return AWQD_UNQUANTIZED;
    case ActivationQuantization::kPerToken:
      return AWQD_INT8_PER_TOKEN;
    case ActivationQuantization::kFloat8PerToken:
      return AWQD_FP8_PER_TOKEN;
    case ActivationQuantization::kFloat8PerBlock:
      return AWQD_FP8_PER_BLOCK_128;
    default:
      Fail("libawqd: got a quantization with scales, expected one without");
  }
}

DevicePtr OpenLibraryDevice(const std::string& name, bool batch_invariant) {
  awqd_device_options options = AWQD_INIT(options);
  options.batch_invariant = batch_invariant;
  awqd_device* device = nullptr;
  CheckCode(awqd_device_open(name.c_str(), &options, &device));
  return DevicePtr(device);
}

StackPtr MakeStack(const std::vector<WeightPtr>& weights, size_t begin, size_t end) {
  std::vector<const awqd_weight*> pointers;
  for (size_t i = begin; i < end; ++i) pointers.push_back(weights[i].get());
  awqd_stack* stack = nullptr;
  CheckCode(awqd_stack_make(pointers.data(), pointers.size(), &stack));
  return StackPtr(stack);
}

}  // namespace

Library::Library(const std::string& device, bool batch_invariant, Machine& machine)
    : machine_(machine), device_(OpenLibraryDevice(device, batch_invariant)) {}

std::vector<WeightPtr> Library::Pack(const HostWeight& weight, size_t count) const {
  const QuantizationScheme& scheme = weight.scheme;
  static const std::map<DType, const char*> kScales = {
      {DType::kFp16, "F16"}, {DType::kBf16, "BF16"}, {DType::kFp32, "F32"}, {DType::kInt8, "I8"}};
  const auto scale = scheme.scale_dtype ? kScales.find(*scheme.scale_dtype) : kScales.end();
  if (!scheme.is_integer() || scheme.real_zeros() || scheme.block_cols != 1 ||
      scale == kScales.end() || !weight.order.empty()) {
    Fail(absl::StrCat("--library: got weights ", ToString(scheme),
                      weight.order.empty() ? "" : " with an order",
                      ", expected integer codes with integer zeros and a scale for each group of a "
                      "column, as format \"plain\" has them"));
  }
  std::vector<uint8_t> codes(weight.k * weight.n);
  for (int64_t i = 0; i < weight.k * weight.n; ++i) {
    codes[i] = static_cast<uint8_t>(weight.Code(i / weight.n, i % weight.n));
  }
  const int64_t matrix[] = {weight.k, weight.n}, groups[] = {weight.groups(), weight.n};
  const int64_t outer[] = {static_cast<int64_t>(weight.outer.size())};
  std::vector<awqd_tensor> tensors = {
      {"codes", "U8", matrix, 2, codes.data(), codes.size()},
      {"scales", scale->second, groups, 2, weight.scales.data(), weight.scales.size()}};
  const std::string bits = absl::StrCat(scheme.bits), zero = absl::StrCat(scheme.zero);
  const std::string group = absl::StrCat(scheme.block_rows == 0 ? -1 : scheme.block_rows);
  std::vector<awqd_setting> settings = {{"bits", bits.c_str()}, {"group_size", group.c_str()}};
  if (scheme.zero_kind == ZeroKind::kStored) {
    tensors.push_back({"zeros", "U8", groups, 2, weight.zeros.data(), weight.zeros.size()});
  } else {
    settings.push_back({"zero", zero.c_str()});
  }
  if (!weight.outer.empty()) {
    tensors.push_back({"outer", "F32", outer, 1, weight.outer.data(), weight.outer.size() * 4});
  }
  std::vector<WeightPtr> out;
  while (out.size() < count) {
    awqd_weight* packed = nullptr;
    CheckCode(awqd_weight_pack(device_.get(), "plain", settings.data(), settings.size(),
                               tensors.data(), tensors.size(), &packed));
    out.emplace_back(packed);
  }
  return out;
}

Buffer Library::MakeWorkspace(int64_t bytes) const {
  Device& device = machine_.device();
  Buffer out = device.Allocate(MemoryKind::kDevice, std::max<int64_t>(bytes, 1)).value();
  auto stream = device.CreateStream().value();
  CheckCode(awqd_workspace_init(device_.get(), {out.data(), out.size()}, stream->view().handle));
  Check(stream->Synchronize());
  return out;
}

LibraryWeights::LibraryWeights(const Library& library, const HostWeight& weight, size_t copies)
    : library_(library), weights_(library.Pack(weight, copies)) {}

void LibraryWeights::Reserve(int64_t bytes) {
  if (workspace_.size() < bytes) workspace_ = library_.MakeWorkspace(bytes);
}

void LibraryWeights::Multiply(int i, const MatmulArgs& args, Path path, StreamView stream) {
  awqd_matmul_args call = AWQD_INIT(call);
  call.m = args.x.rows;
  call.x = args.x.data;
  call.y = args.y.data;
  call.x_dtype = ToLibrary(args.x.dtype);
  call.y_dtype = ToLibrary(args.y.dtype);
  call.quantization = ToLibrary(args.quantization);
  call.path = path == Path::kFused ? AWQD_PATH_FUSED : AWQD_PATH_DEQUANTIZE;
  const awqd_weight* const weight = weights_[i % weights_.size()].get();
  // As a program that multiplies often: sizes are asked for once.
  if (const auto key = std::make_tuple(call.m, args.x.dtype, args.quantization);
      key != sized_for_) {
    int64_t bytes = 0;
    CheckCode(awqd_matmul_workspace(weight, &call, &bytes));
    Reserve(bytes);
    sized_for_ = key;
  }
  CheckCode(awqd_matmul(weight, &call, {workspace_.data(), workspace_.size()}, stream.handle));
}

void LibraryWeights::Decode(int i, const DequantizeArgs& args, StreamView stream) {
  awqd_dequantize_args call = AWQD_INIT(call);
  call.rows = args.out.rows;
  call.cols = args.out.cols;
  call.out = args.out.data;
  call.dtype = ToLibrary(args.out.dtype);
  const awqd_weight* const weight = weights_[i % weights_.size()].get();
  if (const auto key = std::make_tuple(int64_t{0}, args.out.dtype, ActivationQuantization::kNone);
      key != sized_for_) {
    int64_t bytes = 0;
    CheckCode(awqd_dequantize_workspace(weight, &call, &bytes));
    Reserve(bytes);
    sized_for_ = key;
  }
  CheckCode(awqd_dequantize(weight, &call, {workspace_.data(), workspace_.size()}, stream.handle));
}

LibraryExperts::LibraryExperts(const Library& library, size_t experts,
                               const HostWeight& gate_and_up, const HostWeight& down)
    : library_(library) {
  const std::vector<WeightPtr> in = library.Pack(gate_and_up, 2 * experts);
  gate_ = MakeStack(in, 0, experts);
  up_ = MakeStack(in, experts, 2 * experts);
  down_ = MakeStack(library.Pack(down, experts), 0, experts);
}

void LibraryExperts::Multiply(const ConstMatrixView& x, const int32_t* ids,
                              const float* router_weights, int64_t top_k,
                              ActivationQuantization quantization, const MatrixView& y,
                              StreamView stream) {
  awqd_grouped_mlp_args call = AWQD_INIT(call);
  call.gate = gate_.get();
  call.up = up_.get();
  call.down = down_.get();
  call.m = x.rows;
  call.top_k = top_k;
  call.x = x.data;
  call.y = y.data;
  call.expert_ids = ids;
  call.router_weights = router_weights;
  call.x_dtype = ToLibrary(x.dtype);
  call.y_dtype = ToLibrary(y.dtype);
  call.activation = AWQD_SILU;
  call.quantization = ToLibrary(quantization);
  if (sized_for_ != call.m) {
    int64_t bytes = 0;
    CheckCode(awqd_grouped_mlp_workspace(&call, &bytes));
    if (workspace_.size() < bytes) workspace_ = library_.MakeWorkspace(bytes);
    sized_for_ = call.m;
  }
  CheckCode(awqd_grouped_mlp(&call, {workspace_.data(), workspace_.size()}, stream.handle));
}

}  // namespace awqd::bench
