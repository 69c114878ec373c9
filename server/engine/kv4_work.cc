// Runs some tokens at a time, so that a lane's buffers stay bounded.
#include "server/engine/kv4_work.h"

#include <cstring>
#include <optional>

#include "kernels/base/status.h"
#include "server/engine/lane.h"

namespace awqd::engine {
namespace {

// Scales or zeros of `count` tokens from `begin` on.
absl::StatusOr<const void*> UploadScales(Lane& lane, const Kv4Work& work, const Payload& all,
                                         int64_t begin, int64_t count) {
  if (work.per != Kv4Per::kRow) return lane.Upload(all.data(), work.scale_bytes());
  const int64_t token_bytes = work.shape.heads * SizeOf(work.scale_dtype);
  return lane.Upload(all.data() + begin * token_bytes, count * token_bytes);
}

}  // namespace

// An element takes about as long as eight multiplications of a product.
int64_t Kv4Work::cost() const {
  const std::optional<int64_t> elements = CheckedMul(shape.rows(), 8 * shape.head_dim);
  return elements.value_or(kUnknownCost);
}

absl::Status Kv4Work::Run(Lane& lane, const batching::Batch& /*batch*/, char* result,
                          ExecutionReport* report) const {
  AddName(Kv4Of(lane.device()).name, &report->kernel);
  return RunInSteps(shape.tokens, lane.max_rows(), [&](int64_t begin, int64_t count) {
    return RunTokens(lane, begin, count, result);
  });
}

absl::Status Kv4StoreWork::RunTokens(Lane& lane, int64_t begin, int64_t count, char* result) const {
  if (begin == 0 && per == Kv4Per::kRow) {  // what no kernel writes
    const int64_t codes_end = shape.code_bytes(), scales_end = scale_offset() + scale_bytes();
    std::memset(result + codes_end, 0, scale_offset() - codes_end);
    std::memset(result + scales_end, 0, zero_offset() - scales_end);
  }
  const int64_t token_bytes = shape.heads * shape.head_dim * SizeOf(x_dtype);
  const RowPiece rows = {x.data() + begin * token_bytes, count};
  Kv4StoreArgs args = {
      .shape = Tokens(count), .x_dtype = x_dtype, .scale_dtype = scale_dtype, .per = per};
  AWQD_ASSIGN_OR_RETURN(args.x, lane.GatherRows({&rows, 1}, token_bytes));
  const int64_t first_row = begin * shape.heads;
  absl::InlinedVector<ResultPiece, 3> pieces = {
      {result + first_row * shape.row_bytes(), args.shape.code_bytes()}};
  if (per == Kv4Per::kRow) {
    const int64_t size = SizeOf(scale_dtype), bytes = args.shape.rows() * size;
    pieces.push_back({result + scale_offset() + first_row * size, bytes});
    pieces.push_back({result + zero_offset() + first_row * size, bytes});
  }
  AWQD_ASSIGN_OR_RETURN(const Lane::Targets targets, lane.AllocateResults(pieces));
  args.codes = static_cast<uint8_t*>(targets[0]);
  if (per == Kv4Per::kRow) {
    args.scale = targets[1];
    args.zero = targets[2];
  } else {
    AWQD_ASSIGN_OR_RETURN(args.given_scale, UploadScales(lane, *this, given_scale, begin, count));
    AWQD_ASSIGN_OR_RETURN(args.given_zero, UploadScales(lane, *this, given_zero, begin, count));
  }
  AWQD_RETURN_IF_ERROR(awqd::Kv4Store(args, lane.device(), lane.stream()));
  return lane.Fetch(pieces, targets);
}

absl::Status Kv4LoadWork::RunTokens(Lane& lane, int64_t begin, int64_t count, char* result) const {
  const int64_t code_bytes = Tokens(1).code_bytes();
  const int64_t out_bytes = shape.heads * shape.head_dim * SizeOf(out_dtype);
  const RowPiece rows = {codes.data() + begin * code_bytes, count};
  Kv4LoadArgs args = {.shape = Tokens(count), .scale_dtype = scale_dtype, .per = per, .form = form};
  AWQD_ASSIGN_OR_RETURN(const void* codes_there, lane.GatherRows({&rows, 1}, code_bytes));
  args.codes = static_cast<const uint8_t*>(codes_there);
  AWQD_ASSIGN_OR_RETURN(args.scale, UploadScales(lane, *this, scale, begin, count));
  AWQD_ASSIGN_OR_RETURN(args.zero, UploadScales(lane, *this, zero, begin, count));
  char* const to = result + begin * out_bytes;
  AWQD_ASSIGN_OR_RETURN(args.out, lane.AllocateResult(to, count * out_bytes));
  args.out_dtype = out_dtype;
  AWQD_RETURN_IF_ERROR(awqd::Kv4Load(args, lane.device(), lane.stream()));
  return lane.Fetch(to, args.out, count * out_bytes);
}

}  // namespace awqd::engine
