// Copies many small pieces in one launch: the activations and results of callers that share a
// batch, in device memory of theirs.
#include <algorithm>
#include <cstdint>

#include "kernels/base/math.h"
#include "kernels/cuda/core/device.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

// The parameters of one launch; 4 KiB is what a kernel may have.
constexpr int kPieces = 128;
// From this size on a piece has a copy of its own, which is as fast as the memory.
constexpr int64_t kOwnCopyBytes = 256 << 10;
constexpr int kThreads = 256;
// A block copies so much of a piece at least.
constexpr int64_t kBlockBytes = 16 << 10;

struct Pieces {
  struct Piece {
    char* to;
    const char* from;
    int64_t bytes;
  };
  Piece list[kPieces];
};

// Block (i, j) copies part i of piece j.
__global__ void __launch_bounds__(kThreads)
    CopyPiecesKernel(const __grid_constant__ Pieces pieces) {
  const Pieces::Piece piece = pieces.list[blockIdx.y];
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const auto aligned = reinterpret_cast<uintptr_t>(piece.to) |
                       reinterpret_cast<uintptr_t>(piece.from) |
                       static_cast<uintptr_t>(piece.bytes);
  if (aligned % sizeof(uint4) == 0) {
    const auto* const from = reinterpret_cast<const uint4*>(piece.from);
    auto* const to = reinterpret_cast<uint4*>(piece.to);
    for (int64_t i = first; i < piece.bytes / int64_t{sizeof(uint4)}; i += step) to[i] = from[i];
  } else {
    for (int64_t i = first; i < piece.bytes; i += step) piece.to[i] = piece.from[i];
  }
}

}  // namespace

absl::Status CudaDevice::CopyPieces(absl::Span<const CopyPiece> pieces, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(info_.index));
  Pieces small;
  int count = 0;
  int64_t longest = 0;
  const auto launch = [&]() -> absl::Status {
    if (count == 0) return absl::OkStatus();
    const dim3 grid(static_cast<unsigned>(CeilDiv(longest, kBlockBytes)), count);
    AWQD_RETURN_IF_ERROR(Launch<CopyPiecesKernel>(
        "copy pieces", {.grid = grid, .block = kThreads, .stream = stream}, small));
    count = 0;
    longest = 0;
    return absl::OkStatus();
  };
  for (const CopyPiece& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (piece.between_devices || piece.bytes >= kOwnCopyBytes) {
      AWQD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(piece.to, piece.from,
                                                static_cast<size_t>(piece.bytes), cudaMemcpyDefault,
                                                Native(stream)));
      continue;
    }
    small.list[count++] = {static_cast<char*>(piece.to), static_cast<const char*>(piece.from),
                           piece.bytes};
    longest = std::max(longest, piece.bytes);
    if (count == kPieces) AWQD_RETURN_IF_ERROR(launch());
  }
  return launch();
}

}  // namespace awqd::cuda
