// cpu/dequantize: any block of a weight as FP16, BF16 or FP32.
//
// Weight layout: k16, whose padded rows are mapped back. Work split: up to 8 blocks of 128 padded
// rows by chunks of 256 columns. Limits: those of the layout.
#include <algorithm>

#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::K16Weight;

constexpr int64_t kBlockRows = 128;
constexpr int64_t kChunk = cpu::kDequantizeTiles * 8;
constexpr int64_t kMaxDepth = 8;  // blocks of a task
// Results of this size leave the caches before anybody reads them.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

// The first row that lies at or behind a padded row.
int64_t RowAt(const K16Weight& w, int64_t padded) {
  const int64_t padded_group = w.runs_per_group * 16;
  return padded / padded_group * w.group_size + std::min(padded % padded_group, w.group_size);
}

int64_t BlockOf(const K16Weight& w, int64_t row) {
  return (row / w.group_size * w.runs_per_group * 16 + row % w.group_size) / kBlockRows;
}

absl::Status Run(const DequantizeArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const K16Weight w = cpu::AccessK16(*args.weight);
  const MatrixView& out = args.out;
  const int64_t row_end = args.row_begin + out.rows, col_end = args.col_begin + out.cols;
  const int64_t first_block = BlockOf(w, args.row_begin);
  const int64_t blocks = BlockOf(w, row_end - 1) + 1 - first_block;
  const int64_t first_chunk = args.col_begin / kChunk;
  const int64_t chunks = CeilDiv(col_end, kChunk) - first_chunk;
  const int64_t size = SizeOf(out.dtype);
  const bool stream = out.rows * out.cols * size >= kStreamBytes;
  // A thread walks down a few blocks, whose codes follow each other and are prefetched.
  const int64_t share = blocks * chunks / (8 * device.info().threads);
  const int64_t depth = std::clamp<int64_t>(share, 1, kMaxDepth);
  const int64_t strips = CeilDiv(blocks, depth);
  const auto run_block = [&](int64_t block, int64_t chunk) {
    cpu::DequantizeTask task;
    task.block = first_block + block;
    task.row_begin = std::max(args.row_begin, RowAt(w, task.block * kBlockRows));
    task.row_end = std::min(row_end, RowAt(w, (task.block + 1) * kBlockRows));
    task.col_begin = std::max(args.col_begin, chunk * kChunk);
    task.col_end = std::min(col_end, (chunk + 1) * kChunk);
    task.out =
        static_cast<char*>(out.data) +
        ((task.row_begin - args.row_begin) * out.cols + task.col_begin - args.col_begin) * size;
    task.out_stride = out.cols;
    task.out_type = cpu::ElementOf(out.dtype);
    task.stream = stream;
    bodies.dequantize(w, task);
  };
  device.pool().ParallelFor(strips * chunks, [&](int64_t index, int) {
    const int64_t begin = index / chunks * depth;
    for (int64_t block = begin; block < std::min(blocks, begin + depth); ++block) {
      run_block(block, first_chunk + index % chunks);
    }
  });
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuDequantize = {.name = "cpu/dequantize",
                                  .op = Op::kDequantize,
                                  .claims = kElementCodes,
                                  .layout = &kK16Layout,
                                  .priority = 10,
                                  .dequantize = Run};

}  // namespace awqd
