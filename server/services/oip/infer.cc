// Which flow a request is for: known from the name of its model, which is looked at before the
// message is admitted and parsed.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "server/services/methods.h"
#include "server/services/oip/oip_codec.h"
#include "server/services/method_handler.h"

namespace awqd::services::oip {
namespace {

// The message keeps its bytes.
wire::oip::Kind PeekKind(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Valid() || !message.Dump(&slices).ok()) return wire::oip::Kind::kProduct;
  absl::InlinedVector<absl::string_view, 4> pieces;
  for (const grpc::Slice& slice : slices) {
    pieces.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return wire::oip::PeekKind(pieces);
}

}  // namespace

std::shared_ptr<RequestFlow> MakeFlow(Context context, absl::string_view method,
                                      transport::ServerCall* call, const grpc::ByteBuffer& message,
                                      RequestFlow::Done done) {
  const Env& env = context.env;
  const auto product = [&](auto what) -> std::shared_ptr<RequestFlow> {
    using Method = decltype(what);
    auto codec = std::make_unique<OipCodec<typename Method::Request>>(std::move(context));
    return std::make_shared<ProductFlow<Method>>(env, method, call, std::move(codec),
                                                 std::move(done));
  };
  switch (PeekKind(message)) {
    case wire::oip::Kind::kStack:
      return product(GroupedMatmulMethod());
    case wire::oip::Kind::kMlp:
      return product(GatedMlpMethod());
    case wire::oip::Kind::kDequantize:
      return std::make_shared<DequantizeFlow>(
          env, method, call, std::make_unique<OipCodec<v1::DequantizeRequest>>(std::move(context)),
          std::move(done));
    case wire::oip::Kind::kProduct:
      break;
  }
  return product(MatmulMethod());
}

}  // namespace awqd::services::oip
