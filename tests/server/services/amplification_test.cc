// The memory that calls of each method hold while nobody reads their answers: the methods are
// those that reflection lists, so that one without a line in the table fails here.
//
// The bound: the memory for N calls is the bytes that the budget counts, which stay within
// max_in_flight_bytes, plus a constant for each call. Health is not counted, so it has the constant
// only.
#include <malloc.h>

#include <cstdlib>
#include <map>

#include "tests/e2e/http2.h"
#include "tests/server/services/oip_fixture.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/shared_object.h"
#include "tests/testing/wrapped_device.h"
#include "xds/service/orca/v3/orca.pb.h"

// Defined where a sanitizer brings its own allocator.
extern "C" size_t __sanitizer_get_current_allocated_bytes() __attribute__((weak));

namespace awqd::services {
namespace {

constexpr int64_t kLimit = 8 << 20;
constexpr int kConnections = 4, kCallsEach = 24, kCalls = kConnections * kCallsEach;
// Beyond what a health check takes: the objects of a handler, a stream's windows, an error. Most
// have DequantizeStream's calls, 36 KiB.
constexpr int64_t kMoreOfACall = 40 << 10;

// Messages of one call. `held`: measure while the engine has the work, else once it is answered.
struct Attack {
  std::vector<std::string> messages;
  bool held = false;
};

std::string Bytes(const google::protobuf::Message& message) { return message.SerializeAsString(); }

// [1, columns]: each column becomes 64 bytes of codes, from half a byte in the request.
v1::PackedWeight OneRow(int64_t columns) {
  v1::PackedWeight packed;
  *packed.mutable_qweight() = RawTensor(v1::INT32, {1, columns / 8}, columns / 2);
  *packed.mutable_qzeros() = RawTensor(v1::INT32, {1, columns / 8}, columns / 2);
  *packed.mutable_scales() = RawTensor(v1::FP16, {1, columns}, columns * 2);
  packed.set_group_size(-1);
  return packed;
}

class AmplificationTest : public OipTest {
 protected:
  void Configure(Options* options) override {
    WriteModels();
    options->in_flight_bytes = kLimit;
    options->stream_in_flight = 64;
    options->orca = true;
    options->shared_memory = {.prefixes = {prefix_}, .max_open = 4};
    options->sharing_devices = {&gpu_};
  }
  // Writes a model of 900 weights with long paths, and folders that cannot be loaded, each with a
  // reason.
  void WriteModels() {
    std::vector<std::pair<std::string, int64_t>> linears;
    for (int i = 0; i < 900; ++i) {
      linears.emplace_back(absl::StrCat(std::string(200, 'p'), ".layer", i), 8);
    }
    WriteTinyModel(root_ / "many", linears);
    ASSERT_TRUE(models_->Load("many").ok());
    for (int i = 0; i < 300; ++i) {
      const std::filesystem::path folder = root_ / absl::StrCat("bad", i);
      std::filesystem::create_directories(folder);
      std::ofstream(folder / "config.json")
          << R"({"quantization_config": {"quant_method": ")" << std::string(400, 'q') << "\"}}";
    }
  }
  void RegisterRegions() {
    for (int i = 0; i < 200; ++i) {
      inference::SystemSharedMemoryRegisterRequest request;
      request.set_name(absl::StrCat(std::string(100, 'r'), i));
      request.set_key("/" + object_.name());
      request.set_byte_size(16);
      inference::SystemSharedMemoryRegisterResponse response;
      ASSERT_TRUE(Call(&Stub::SystemSharedMemoryRegister, request, &response).ok());
    }
  }

  // The allocated bytes, without the buffers that the staging pool keeps for later requests.
  int64_t Held() {
    int64_t allocated = 0;
    if (__sanitizer_get_current_allocated_bytes != nullptr) {
      allocated = static_cast<int64_t>(__sanitizer_get_current_allocated_bytes());
    } else {
      const struct mallinfo2 info = mallinfo2();
      allocated = static_cast<int64_t>(info.uordblks + info.hblkhd);
    }
    return allocated - engine_.staging().stats().kept_bytes;
  }

  // Waits until nothing has changed for a while.
  bool Settled() {
    int64_t last = 0;
    int same = 0;
    return Eventually(
        [&] {
          const int64_t held = Held();
          same = std::abs(held - last) < (16 << 10) ? same + 1 : 0;
          last = held;
          return same == 20;
        },
        absl::Minutes(2));
  }
  int64_t Started(const std::string& method) {
    for (const obs::MethodStats& calls : server_->admission()->Calls()) {
      if (calls.method == method) return calls.started;
    }
    return -1;
  }

  struct Found {
    int64_t held = 0;     // allocated since the calls began
    int64_t counted = 0;  // bytes in flight
  };
  // Makes kCalls of the method, on connections with a window of 0.
  Found Run(const std::string& method, const Attack& attack) {
    engine_.Hold(attack.held);
    const int64_t before = Held(), started = Started(method);
    std::vector<std::unique_ptr<Socket>> sockets;
    for (int i = 0; i < kConnections; ++i) {
      sockets.push_back(std::make_unique<Socket>(PortOf(server_->address())));
      const std::string no_window("\0\4\0\0\0\0", 6);
      sockets.back()->Send(Hello() + Frame(kSettings, 0, 0, no_window));
      for (uint32_t call = 0; call < kCallsEach; ++call) {
        const uint32_t stream = 2 * call + 1;
        std::string frames = Frame(kHeaders, kEndHeaders, stream, CallHeaders(method));
        for (const std::string& message : attack.messages) {
          const std::string framed = Message(static_cast<uint32_t>(message.size()), message);
          frames += Frame(kData, 0, stream, framed);
        }
        sockets.back()->Send(frames + Frame(kData, kEndStream, stream, ""));
      }
    }
    EXPECT_TRUE(Eventually([&] { return Started(method) == started + kCalls; })) << method;
    EXPECT_TRUE(Settled()) << method;
    const Found found = {Held() - before, server_->in_flight_bytes()};
    sockets.clear();
    EXPECT_TRUE(Eventually([&] {
      while (engine_.held() > 0) engine_.Answer();
      return server_->in_flight_bytes() == 0 && server_->admission()->drain()->in_flight() == 0;
    })) << method
        << ": got " << server_->in_flight_bytes()
        << " bytes in flight after its calls, expected none";
    engine_.Hold(false);
    EXPECT_TRUE(Settled());
    return found;
  }

  // One line for each method: the messages that make the server hold most memory for the bytes
  // sent.
  std::map<std::string, std::vector<Attack>> Table() const {
    const std::string api = "awqd.v1.QuantizedInference/", oip = "inference.GRPCInferenceService/",
                      repository = "awqd.v1.ModelRepository/";
    v1::QuantizedMatmulRequest wide = GoodMatmul(2), packed = GoodMatmul(1), absent = GoodMatmul(1);
    wide.mutable_weight()->set_weight("wide");  // 512 bytes in, 16 KiB out
    *packed.mutable_packed() = OneRow(512);
    *packed.mutable_activations() = RawTensor(v1::FP16, {1, 1}, 2);
    absent.mutable_weight()->set_model("many");
    absent.mutable_weight()->set_weight(std::string(200, 'p'));  // five suggestions
    absent.mutable_activations()->Clear();
    *absent.mutable_activations() = RawTensor(v1::FP16, {1, 1}, 2);
    v1::DequantizeRequest block = GoodDequantize();
    block.mutable_weight()->set_weight("wide");
    block.mutable_rows()->set_end(16);  // 128 KiB
    v1::GroupedQuantizedMatmulRequest grouped;
    *grouped.mutable_packed()->add_experts() = OneRow(512);
    *grouped.mutable_activations() = RawTensor(v1::FP16, {1, 1}, 2);
    *grouped.mutable_expert_ids() = RawTensor(v1::INT32, {1, 1}, 4);
    v1::GatedMlpRequest mlp;
    *mlp.mutable_packed()->mutable_gate()->add_experts() = OneRow(64);
    *mlp.mutable_packed()->mutable_up()->add_experts() = OneRow(64);
    v1::PackedWeight& down = *mlp.mutable_packed()->mutable_down()->add_experts();
    *down.mutable_qweight() = RawTensor(v1::INT32, {64, 1}, 256);
    *down.mutable_qzeros() = RawTensor(v1::INT32, {1, 1}, 4);
    *down.mutable_scales() = RawTensor(v1::FP16, {1, 8}, 16);
    down.set_group_size(-1);
    *mlp.mutable_activations() = RawTensor(v1::FP16, {1, 1}, 2);
    mlp.set_activation_function(v1::SILU);
    v1::QuantizeKvRequest quantize_kv;
    *quantize_kv.mutable_block() = RawTensor(v1::FP16, {1, 1, 1024}, 2048);
    v1::DequantizeKvRequest dequantize_kv;
    *dequantize_kv.mutable_codes() = RawTensor(v1::UINT8, {1, 1, 1024}, 1024);
    *dequantize_kv.mutable_scales() = RawTensor(v1::FP32, {1}, 4);
    *dequantize_kv.mutable_zeros() = RawTensor(v1::FP32, {1}, 4);
    dequantize_kv.set_output_dtype(v1::FP32);
    v1::GetModelRequest page;
    page.set_name("many");
    v1::LoadModelRequest load;
    load.set_name("bad0");
    v1::UnloadModelRequest unload;
    unload.set_name("bad0");
    inference::ModelInferRequest infer = GoodInfer(), missing = GoodInfer();
    infer.set_model_name("tiny/wide");
    missing.set_model_name("many/" + std::string(200, 'p'));
    inference::ModelReadyRequest ready;
    ready.set_name("many");
    inference::ModelMetadataRequest metadata;
    metadata.set_name("tiny/layer");
    inference::ModelConfigRequest config;
    config.set_name("tiny/layer");
    inference::RepositoryModelLoadRequest oip_load;
    oip_load.set_model_name("bad0");
    inference::RepositoryModelUnloadRequest oip_unload;
    oip_unload.set_model_name("bad0");
    inference::SystemSharedMemoryRegisterRequest region;
    region.set_name("r");
    region.set_key("/" + object_.name());
    region.set_byte_size(16);
    v1::ShareMemoryRequest share;  // one call has the region, the others are refused
    share.set_region(std::string(128, 'r'));
    share.set_device(gpu_.info().id);
    share.set_cuda_ipc_memory(testing::WrappedDevice::Export(prefix_.data(), 8));
    share.set_size(8);
    inference::SystemSharedMemoryUnregisterRequest no_region;
    no_region.set_name("none");
    grpc::reflection::v1::ServerReflectionRequest symbol;
    symbol.set_file_containing_symbol("inference.GRPCInferenceService");
    const std::vector<std::string> errors(20, Bytes(absent)), oip_errors(20, Bytes(missing));
    return {
        {api + "QuantizedMatmul", {{{Bytes(wide)}}, {{Bytes(packed)}, true}, {{Bytes(absent)}}}},
        {api + "QuantizedMatmulStream", {{{4, Bytes(wide)}}, {errors}}},
        {api + "Dequantize", {{{Bytes(block)}}}},
        {api + "DequantizeStream", {{{Bytes(block)}}}},
        {api + "GroupedQuantizedMatmul", {{{Bytes(grouped)}, true}}},
        {api + "GatedMlp", {{{Bytes(mlp)}, true}}},
        {api + "QuantizeKv", {{{Bytes(quantize_kv)}}}},
        {api + "DequantizeKv", {{{Bytes(dequantize_kv)}}}},
        {api + "ShareMemory", {{{Bytes(share)}}}},
        {repository + "ListModels", {{{""}}}},
        {repository + "GetModel", {{{Bytes(page)}}}},
        {repository + "LoadModel", {{{Bytes(load)}}}},
        {repository + "UnloadModel", {{{Bytes(unload)}}}},
        {"awqd.v1.ServerInfo/GetServerInfo", {{{""}}}},
        {oip + "ServerLive", {{{""}}}},
        {oip + "ServerReady", {{{""}}}},
        {oip + "ModelReady", {{{Bytes(ready)}}}},
        {oip + "ServerMetadata", {{{""}}}},
        {oip + "ModelMetadata", {{{Bytes(metadata)}}}},
        {oip + "ModelConfig", {{{Bytes(config)}}}},
        {oip + "ModelStatistics", {{{""}}}},
        {oip + "ModelInfer", {{{Bytes(infer)}}, {{Bytes(missing)}}}},
        {oip + "ModelStreamInfer", {{{4, Bytes(infer)}}, {oip_errors}}},
        {oip + "RepositoryIndex", {{{""}}}},
        {oip + "RepositoryModelLoad", {{{Bytes(oip_load)}}}},
        {oip + "RepositoryModelUnload", {{{Bytes(oip_unload)}}}},
        {oip + "SystemSharedMemoryStatus", {{{""}}}},
        {oip + "SystemSharedMemoryRegister", {{{Bytes(region)}}}},
        {oip + "SystemSharedMemoryUnregister", {{{Bytes(no_region)}}}},
        {oip + "CudaSharedMemoryStatus", {{{""}}}},
        {oip + "CudaSharedMemoryRegister", {{{""}}}},
        {oip + "CudaSharedMemoryUnregister", {{{""}}}},
        {oip + "TraceSetting", {{{""}}}},
        {oip + "LogSettings", {{{""}}}},
        {"grpc.health.v1.Health/Check", {{{""}}}},
        {"grpc.health.v1.Health/Watch", {{{""}}}},
        {kReflection + 1, {{{Bytes(symbol)}}}},
        {kReflectionAlpha + 1, {{{Bytes(symbol)}}}},
        {"xds.service.orca.v3.OpenRcaService/StreamCoreMetrics", {{{""}}}},
    };
  }

  const std::string prefix_ = "awqd-amplify-" + std::to_string(getpid()) + "-";
  SharedObject object_{prefix_ + "object", std::string(4096, 'o')};
  testing::WrappedDevice gpu_{*OpenDevice("cpu", {}), /*host_addressable=*/false};
};

TEST_F(AmplificationTest, EveryMethodHoldsWhatIsCountedAndAConstantForEachCall) {
  RegisterRegions();
  const auto table = Table();
  // Runs it twice, because objects that are made on first use belong to no call.
  Run("grpc.health.v1.Health/Check", {{""}});
  const int64_t of_a_call = Run("grpc.health.v1.Health/Check", {{""}}).held / kCalls;
  EXPECT_LT(of_a_call, 32 << 10);
  for (const std::string& method : MethodsByReflection(channel_)) {
    const auto line = table.find(method);
    if (line == table.end()) {
      ADD_FAILURE() << method << " has no line in the table: what makes it hold most?";
      continue;
    }
    for (const Attack& attack : line->second) {
      const Found found = Run(method, attack);
      EXPECT_LE(found.counted, kLimit) << method;
      EXPECT_LE(found.held, found.counted + kCalls * (of_a_call + kMoreOfACall))
          << method << ": got " << found.held / kCalls << " bytes for each of " << kCalls
          << " calls of " << attack.messages.size() << " messages of "
          << attack.messages.front().size() << " bytes, of which " << found.counted / kCalls
          << " are counted";
    }
  }
}

}  // namespace
}  // namespace awqd::services
