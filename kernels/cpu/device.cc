// CpuDevice: aligned host memory under a budget, streams on which work is done at once.
#include "kernels/cpu/device.h"

#if defined(AWQD_CPU_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(AWQD_CPU_ARM64)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/backends.h"
#include "kernels/base/host_memory.h"
#include "kernels/base/process_limits.h"

namespace awqd {
namespace {

constexpr int64_t kSmallAlign = 256;
// From here on memory is mapped for its buffer alone. Weights are streamed end to end: 2 MiB pages
// take the TLB out of the way. The C library would put such buffers between small blocks once it
// has seen one come and go, where neither their memory nor the advice given for it goes away with
// them.
constexpr int64_t kOwnMapping = kHugePageBytes;

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "model name")) continue;
    const size_t colon = rest.find(": ");
    if (colon != absl::string_view::npos) return std::string(rest.substr(colon + 2));
  }
  return "CPU";
}

// The instruction sets of this architecture, in the order of CpuIsa.
constexpr CpuIsa kIsas[] = {
    CpuIsa::kPortable,
#if defined(AWQD_CPU_X86)
    CpuIsa::kAvx2,     CpuIsa::kAvxVnni, CpuIsa::kAvx512, CpuIsa::kAvx512Vnni, CpuIsa::kAmx,
#elif defined(AWQD_CPU_ARM64)
    CpuIsa::kNeon,
    CpuIsa::kNeonDot,
#endif
};

#if defined(AWQD_CPU_X86)
// clang 14 has no names for F16C, AVX-VNNI and AMX in __builtin_cpu_supports. The registers of the
// first two are AVX2's.
bool HasF16c() {
  constexpr unsigned kF16c = 1u << 29;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}

bool HasAvxVnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
}

bool MachineHasAmx() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kTile) != 0 && (edx & kInt8) != 0;
}

// Linux saves AMX's registers, 8 KiB of a thread, only for processes that asked for them. The
// permission holds for all threads, present and future.
bool RequestAmxRegisters() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Whether the machine has AMX-INT8 and the kernel lets this process use its registers, for which
// the first call asks. Thread-safe.
bool HasAmx() {
  static const bool has = MachineHasAmx() && RequestAmxRegisters();
  return has;
}
#endif

bool MachineHas(CpuIsa isa) {
#if defined(AWQD_CPU_X86)
  __builtin_cpu_init();
  switch (isa) {
    case CpuIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
    case CpuIsa::kAvxVnni:
      return MachineHas(CpuIsa::kAvx2) && HasAvxVnni();
    case CpuIsa::kAvx512:
      return MachineHas(CpuIsa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case CpuIsa::kAvx512Vnni:
      return MachineHas(CpuIsa::kAvx512) && __builtin_cpu_supports("avx512vnni");
    case CpuIsa::kAmx:
      return MachineHas(CpuIsa::kAvx512Vnni) && HasAmx();
    default:
      break;
  }
#elif defined(AWQD_CPU_ARM64)
  // Every aarch64 machine that runs Linux has NEON.
  if (isa == CpuIsa::kNeon) return true;
  if (isa == CpuIsa::kNeonDot) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  return isa == CpuIsa::kPortable;
}

DeviceInfo Describe(const DeviceOptions& options, std::optional<int> index) {
  DeviceInfo info;
  info.kind = DeviceKind::kCpu;
  info.index = index.value_or(0);
  info.id = index.has_value() ? absl::StrCat("cpu:", *index) : "cpu";
  info.id += options.id_suffix;
  info.name = CpuName();
  info.memory_bytes = TotalMemoryBytes();
  info.threads = options.cpu_threads > 0 ? options.cpu_threads : UsableThreads();
  info.isa = DetectIsa();
  info.batch_invariant = options.batch_invariant;
  return info;
}

void FreeAlignedBytes(void* data, int64_t bytes) {
  if (bytes >= kOwnMapping) return UnmapHugePages(data, bytes);
  std::free(data);
}

// Work on the CPU is done when the call returns.
class CpuStream final : public Stream {
 public:
  StreamView view() const override { return {}; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

absl::Status NoRoom(int64_t bytes, int64_t free) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cpu memory: asked for ", bytes, " bytes, ", free, " bytes are free"));
}

}  // namespace

CpuIsa DetectIsa() {
  const char* const wish = std::getenv("AWQD_CPU_ISA");
  CpuIsa best = CpuIsa::kPortable;
  for (const CpuIsa isa : kIsas) {
    if (MachineHas(isa)) best = isa;
    if (wish != nullptr && Name(isa) == absl::string_view(wish)) break;
  }
  return best;
}

CpuDevice::CpuDevice(const DeviceOptions& options, std::optional<int> index)
    : info_(Describe(options, index)),
      interleave_(options.cpu_interleave),
      pool_(info_.threads, options.cpu_pin_threads),
      budget_(options.budget_bytes) {}

void* CpuDevice::AlignedBytes(int64_t bytes) const {
  if (bytes >= kOwnMapping) {
    void* const data = MapHugePages(bytes);
    if (data != nullptr && interleave_) InterleavePages(data, bytes);
    return data;
  }
  void* data = nullptr;
  if (posix_memalign(&data, kSmallAlign, std::max(bytes, kSmallAlign)) != 0) return nullptr;
  return data;
}

int64_t CpuDevice::FreeBytes() const {
  const int64_t physical = AvailableMemoryBytes();
  const int64_t budget = budget_;
  return budget == 0 ? physical : std::min(physical, std::max<int64_t>(0, budget - used_));
}

bool CpuDevice::Reserve(int64_t bytes) {
  int64_t used = used_;
  do {
    const int64_t budget = budget_;
    if (budget != 0 && bytes > budget - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

absl::StatusOr<Buffer> CpuDevice::Allocate(MemoryKind kind, int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cpu memory: got ", bytes, " bytes, expected 0 or more"));
  }
  const bool counted = kind != MemoryKind::kStaging;
  // Small requests are not worth reading /proc for; the allocator answers for them.
  const bool large = bytes >= kOwnMapping;
  if ((large && bytes > AvailableMemoryBytes()) || (counted && !Reserve(bytes))) {
    return NoRoom(bytes, FreeBytes());
  }
  void* data = AlignedBytes(bytes);
  if (data == nullptr) {
    if (counted) used_ -= bytes;
    return NoRoom(bytes, FreeBytes());
  }
  return Buffer(data, bytes, [this, counted](void* memory, int64_t size) {
    FreeAlignedBytes(memory, size);
    if (counted) used_ -= size;
  });
}

absl::StatusOr<std::unique_ptr<Stream>> CpuDevice::CreateStream() {
  return std::make_unique<CpuStream>();
}

absl::Status CpuDevice::CopyToDevice(void* device, const void* host, int64_t bytes, StreamView) {
  if (bytes > 0) std::memcpy(device, host, bytes);
  return absl::OkStatus();
}

absl::Status CpuDevice::CopyToHost(void* host, const void* device, int64_t bytes, StreamView) {
  if (bytes > 0) std::memcpy(host, device, bytes);
  return absl::OkStatus();
}

absl::Status CpuDevice::CopyPieces(absl::Span<const CopyPiece> pieces, StreamView) {
  for (const CopyPiece& piece : pieces) {
    if (piece.bytes > 0) std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  }
  return absl::OkStatus();
}

std::unique_ptr<Device> OpenCpuDevice(const DeviceOptions& options, std::optional<int> index) {
  return std::make_unique<CpuDevice>(options, index);
}

}  // namespace awqd
