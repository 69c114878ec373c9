// PrepareWeight: chooses a weight's layout and rows, and packs it into a device's memory.
#include <algorithm>
#include <cstring>

#include "kernels/base/digest.h"
#include "kernels/base/host_memory.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "kernels/lending/arena.h"

namespace awqd {
namespace {

constexpr int kAnyOctaves = 512;  // octaves between the smallest and the largest FP32

// Clears the gaps between sections, because they are copied to the device too.
void ClearGaps(const Sections& sections, uint8_t* out) {
  for (int part = 0; part < kParts; ++part) {
    const int64_t bytes = sections.bytes(static_cast<Part>(part));
    uint8_t* const end = out + sections.offset(static_cast<Part>(part)) + bytes;
    std::memset(end, 0, RoundUp(bytes, Sections::kAlign) - bytes);
  }
}

// Packs all columns into `out`, uninitialised host memory.
void PackAll(const HostWeight& weight, const DeviceWeight& like, uint8_t* out) {
  ClearGaps(like.sections, out);
  ForEachPart(weight.n, ColumnRange::kStep, like.sections.total(), [&](int64_t begin, int64_t end) {
    like.layout->pack(weight, {begin, end}, like.sections, out);
    if (begin == 0) PackCommonParts(*like.layout, weight, like.sections, out);
  });
}

Buffer Pageable(int64_t bytes) {
  auto* const data = new uint8_t[bytes];
  AdviseHugePages(data, bytes);
  return Buffer(data, bytes, [](void* memory, int64_t) { delete[] static_cast<uint8_t*>(memory); });
}

// Packs straight into the device's memory if the host can write to it. `arena`, that memory's, gets
// the digest; it may be null.
absl::Status Pack(const HostWeight& weight, Device& device, WeightArena* arena, PackMemory* memory,
                  DeviceWeight* out) {
  const int64_t bytes = out->sections.total();
  const auto pack = [&](uint8_t* to) {
    PackAll(weight, *out, to);
    if (arena != nullptr) arena->SetDigest(*out, DigestOfWeight(to, bytes));
  };
  if (device.host_addressable()) {
    pack(static_cast<uint8_t*>(out->storage.data()));
    return absl::OkStatus();
  }
  Buffer own;
  uint8_t* host = nullptr;
  if (memory != nullptr) {
    host = memory->Get(device, bytes);
  } else {
    own = Pageable(bytes);
    host = static_cast<uint8_t*>(own.data());
  }
  pack(host);
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateCopyStream());
  AWQD_RETURN_IF_ERROR(device.CopyToDevice(out->storage.data(), host, bytes, stream->view()));
  return stream->Synchronize();
}

}  // namespace

uint8_t* PackMemory::Get(Device& device, int64_t bytes) {
  MutexLock lock(&mu_);
  Buffer& kept = kept_[&device];
  if (kept.size() < bytes) {
    kept.Reset();  // first, so that both are never there
    auto pinned = device.Allocate(MemoryKind::kStaging, bytes);
    kept = pinned.ok() ? *std::move(pinned) : Pageable(bytes);
  }
  return static_cast<uint8_t*>(kept.data());
}

absl::StatusOr<PreparedSize> PreparedBytes(const HostWeight& weight, const DeviceInfo& device) {
  WeightShape shape = ShapeOf(weight);
  struct Measured {
    int octaves;
    bool large;
  };
  std::vector<Measured> scales = {{shape.scale_octaves, shape.large_scales}};
  if (weight.scheme.scale_dtype && weight.scales.empty()) {
    const bool half = weight.scheme.scale_dtype == DType::kFp16;
    if (half) scales.push_back({0, true});
    scales.push_back({kAnyOctaves, half});
  }
  PreparedSize out;
  for (const Measured& measured : scales) {
    shape.scale_octaves = measured.octaves;
    shape.large_scales = measured.large;
    AWQD_ASSIGN_OR_RETURN(const Plan plan, Select(shape, device, AllKernels()));
    const int64_t bytes = SectionsOf(*plan.layout, shape, &weight).total();
    out.least = out.most == 0 ? bytes : std::min(out.least, bytes);
    out.most = std::max(out.most, bytes);
  }
  return out;
}

namespace {

// `arena`: may be null.
absl::StatusOr<std::shared_ptr<const DeviceWeight>> Prepare(const HostWeight& weight,
                                                            Device& device,
                                                            absl::Span<const KernelRow* const> rows,
                                                            WeightArena* arena,
                                                            PackMemory* memory) {
  AWQD_RETURN_IF_ERROR(Validate(weight));
  auto out = std::make_shared<DeviceWeight>();
  out->shape = ShapeOf(weight);
  out->format = weight.format;
  out->hadamard = weight.hadamard;
  out->activations = weight.activations;
  out->device = &device;
  AWQD_ASSIGN_OR_RETURN(Plan plan, Select(out->shape, device.info(), rows));
  out->layout = plan.layout;
  out->plan = std::move(plan.rows);
  out->sections = SectionsOf(*out->layout, out->shape, &weight);
  const int64_t bytes = out->sections.total();
  AWQD_ASSIGN_OR_RETURN(out->storage, arena == nullptr
                                          ? device.Allocate(MemoryKind::kWeights, bytes)
                                          : arena->Allocate(bytes));
  AWQD_RETURN_IF_ERROR(Pack(weight, device, arena, memory, out.get()));
  return std::shared_ptr<const DeviceWeight>(std::move(out));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeight(
    const HostWeight& weight, Device& device, absl::Span<const KernelRow* const> rows,
    PackMemory* memory) {
  return Prepare(weight, device, rows, nullptr, memory);
}

absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareWeightIn(WeightArena& arena,
                                                                    const HostWeight& weight,
                                                                    Device& device,
                                                                    PackMemory* memory) {
  return Prepare(weight, device, AllKernels(), &arena, memory);
}

}  // namespace awqd
