// ModelRepository and ServerInfo.
#include <atomic>
#include <fstream>
#include <future>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/server/services/rpc_fixture.h"
#include "tests/testing/readdir_hook.h"

namespace awqd::services {
namespace {

using ::testing::HasSubstr;

using RepositoryTest = RpcTest;

// Writes `file` with "qzeroz" for "qzeros" everywhere but in the tensors of `kept`: no other weight
// of it is served.
void MisspellZeros(const std::filesystem::path& file, const std::string& kept) {
  std::ifstream stream(file, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  for (size_t at = 0; (at = bytes.find(".qzeros", at)) != std::string::npos; ++at) {
    if (!absl::EndsWith(absl::string_view(bytes).substr(0, at), kept)) bytes[at + 6] = 'z';
  }
  std::ofstream(file, std::ios::binary) << bytes;
}

TEST_F(RepositoryTest, ListsAndDescribes) {
  grpc::ClientContext list_context;
  v1::ListModelsResponse list;
  ASSERT_TRUE(repository_->ListModels(&list_context, {}, &list).ok());
  ASSERT_EQ(list.models_size(), 1);
  EXPECT_EQ(list.models(0).name(), "tiny");
  EXPECT_EQ(list.models(0).state(), v1::READY);
  EXPECT_EQ(list.models(0).weights(), 2);

  grpc::ClientContext get_context;
  v1::GetModelRequest request;
  request.set_name("tiny");
  v1::GetModelResponse model;
  ASSERT_TRUE(repository_->GetModel(&get_context, request, &model).ok());
  EXPECT_EQ(model.weights(0).path(), "layer");
  EXPECT_EQ(model.weights(0).k(), 128);
  EXPECT_EQ(model.weights(0).scheme(), "w4cz");
  EXPECT_EQ(model.weights(0).device(), "cpu");
  ASSERT_EQ(model.weights(0).parts_size(), 1);
  EXPECT_EQ(model.weights(0).parts(0).device(), "cpu");
  EXPECT_EQ(model.weights(0).parts(0).column_begin(), 0);
  EXPECT_EQ(model.weights(0).parts(0).column_end(), model.weights(0).n());
  EXPECT_EQ(model.weights(0).parts(0).bytes(), model.weights(0).bytes());
  EXPECT_GT(model.weights(0).plan_size(), 0);
  EXPECT_FALSE(model.weights(0).dequantize_kernel().empty());
}

class PagesTest : public RepositoryTest {
 protected:
  // "l.experts.0.up" and so on: ten weights, and the two stacks that they are in.
  void Load() {
    std::vector<std::pair<std::string, int64_t>> linears;
    for (int i = 0; i < 5; ++i) {
      for (const char* name : {"down", "up"}) {
        linears.emplace_back(absl::StrCat("l.experts.", i, ".", name), 16);
      }
    }
    WriteTinyModel(root_ / "tiny", linears);
    ASSERT_TRUE(models_->Load("tiny").ok());
  }
  grpc::Status Get(int page_size, const std::string& token, v1::GetModelResponse* response) {
    v1::GetModelRequest request;
    request.set_name("tiny");
    request.set_page_size(page_size);
    request.set_page_token(token);
    grpc::ClientContext context;
    Deadline(&context);
    return repository_->GetModel(&context, request, response);
  }
};

TEST_F(PagesTest, TogetherAreTheModelWhateverTheirSize) {
  Load();
  v1::GetModelResponse whole;
  ASSERT_TRUE(Get(0, "", &whole).ok());
  EXPECT_EQ(whole.weights_size(), 10);
  EXPECT_EQ(whole.stacks_size(), 2);
  EXPECT_EQ(whole.next_page_token(), "");
  for (int size = 1; size <= 13; ++size) {
    v1::GetModelResponse all, page;
    int pages = 0;
    do {
      const std::string token = page.next_page_token();
      page.Clear();
      ASSERT_TRUE(Get(size, token, &page).ok());
      EXPECT_LE(page.weights_size() + page.stacks_size(), size);
      EXPECT_EQ(page.model().weights(), 10) << "of the model, on every page";
      all.MergeFrom(page);
      ++pages;
    } while (!page.next_page_token().empty());
    all.clear_next_page_token();
    EXPECT_EQ(pages, (12 + size - 1) / size);
    EXPECT_EQ(all.SerializeAsString(), whole.SerializeAsString()) << size;
  }
}

TEST_F(PagesTest, ASizeOrATokenOfNoPageIsRefused) {
  Load();
  v1::GetModelResponse page;
  EXPECT_THAT(Get(-1, "", &page).error_message(), HasSubstr("page_size: got -1, expected"));
  for (const char* token : {"x", "1", "1:w", "1:x:l", ":w:l", "1e9:w:"}) {
    const grpc::Status status = Get(1, token, &page);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << token;
    EXPECT_THAT(status.error_message(), HasSubstr("page_token"));
  }
}

TEST_F(PagesTest, APageOfAnotherLoadIsRefused) {
  Load();
  v1::GetModelResponse page;
  ASSERT_TRUE(Get(1, "", &page).ok());
  ASSERT_TRUE(models_->Load("tiny").ok());
  const grpc::Status status = Get(1, page.next_page_token(), &page);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("begin with the first page"));
}

TEST_F(PagesTest, AnAnswerIsNoLargerThanTheServerSends) {
  std::vector<std::pair<std::string, int64_t>> linears;
  for (int i = 0; i < 1200; ++i) {
    linears.emplace_back(absl::StrCat(std::string(900, 'p'), ".l", i), 8);
  }
  WriteTinyModel(root_ / "tiny", linears);
  ASSERT_TRUE(models_->Load("tiny").ok());
  v1::GetModelResponse page;
  int weights = 0, pages = 0;
  do {
    const std::string token = page.next_page_token();
    page.Clear();
    const grpc::Status status = Get(0, token, &page);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_LT(page.ByteSizeLong(), kMessageLimit);
    weights += page.weights_size();
    ++pages;
  } while (!page.next_page_token().empty());
  EXPECT_EQ(weights, 1200);
  EXPECT_GT(pages, 2) << "1000 weights would have been too many bytes";
}

class LargePagesTest : public PagesTest {
 protected:
  void Configure(Options* options) override {
    options->transport.max_send_message_bytes = 16 * kMessageLimit;
  }
};

// An entry of a served weight has a line a kernel of this machine, and fewer than a thousand may fill
// an answer. Entries of weights that are not served are short.
TEST_F(LargePagesTest, AnAnswerHasAThousandEntriesAtMost) {
  std::vector<std::pair<std::string, int64_t>> linears;
  for (int i = 0; i < 1001; ++i) linears.emplace_back(absl::StrCat("l", i), 8);
  WriteTinyModel(root_ / "tiny", linears);
  MisspellZeros(root_ / "tiny/model.safetensors", "\"l0");
  ASSERT_TRUE(models_->Load("tiny").ok());
  for (const int size : {0, 5000}) {
    v1::GetModelResponse page;
    const grpc::Status status = Get(size, "", &page);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(page.weights_size(), 1);
    EXPECT_EQ(page.unserved_size(), 999);
    EXPECT_FALSE(page.next_page_token().empty());
  }
}

// A page of each kind, and the same in the answer to a load.
TEST_F(RepositoryTest, NamesTheWeightsThatAreNotServed) {
  WriteTinyModel(root_ / "tiny", {{"l.down", 16}, {"l.up", 16}});
  MisspellZeros(root_ / "tiny/model.safetensors", "l.down");
  v1::LoadModelRequest load;
  load.set_name("tiny");
  v1::LoadModelResponse loaded;
  grpc::ClientContext load_context;
  ASSERT_TRUE(repository_->LoadModel(&load_context, load, &loaded).ok());
  EXPECT_EQ(loaded.model().weights(), 1);
  EXPECT_EQ(loaded.model().unserved_weights(), 1);
  EXPECT_THAT(loaded.model().message(), HasSubstr("1 of 2 quantised weights are not served"));
  ASSERT_EQ(loaded.unserved_size(), 1);
  EXPECT_EQ(loaded.unserved(0).path(), "l.up");
  EXPECT_EQ(loaded.unserved(0).code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(loaded.unserved(0).reason(),
              HasSubstr("tensor \"l.up.qzeroz\": format awq has no such"));

  std::vector<std::string> pages;
  v1::GetModelRequest request;
  request.set_name("tiny");
  request.set_page_size(1);
  do {
    grpc::ClientContext context;
    v1::GetModelResponse page;
    ASSERT_TRUE(repository_->GetModel(&context, request, &page).ok());
    for (const auto& weight : page.weights()) pages.push_back(weight.path());
    for (const auto& weight : page.unserved()) pages.push_back("not " + weight.path());
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(pages, ::testing::ElementsAre("l.down", "not l.up"));

  load.set_require_all_weights(true);
  grpc::ClientContext again;
  const grpc::Status status = repository_->LoadModel(&again, load, &loaded);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("all weights are required"));
}

TEST_F(RepositoryTest, DescribesStacks) {
  WriteTinyModel(root_ / "tiny", {{"l.experts.0.down", 16},
                                  {"l.experts.1.down", 32},
                                  {"l.experts.0.up", 16},
                                  {"l.experts.1.up", 16}});
  v1::LoadModelRequest load;
  load.set_name("tiny");
  v1::LoadModelResponse loaded;
  grpc::ClientContext load_context;
  ASSERT_TRUE(repository_->LoadModel(&load_context, load, &loaded).ok());
  EXPECT_EQ(loaded.model().stacks(), 2);
  EXPECT_EQ(loaded.model().loaded_share(), 1.0f);
  grpc::ClientContext list_context;
  v1::ListModelsResponse list;
  ASSERT_TRUE(repository_->ListModels(&list_context, {}, &list).ok());
  for (const v1::ModelSummary& summary : list.models()) {
    EXPECT_EQ(summary.loaded_share(), summary.name() == "tiny" ? 1.0f : 0.0f) << summary.name();
  }

  v1::GetModelRequest request;
  request.set_name("tiny");
  v1::GetModelResponse model;
  grpc::ClientContext context;
  ASSERT_TRUE(repository_->GetModel(&context, request, &model).ok());
  EXPECT_EQ(model.model().stacks(), 2);
  EXPECT_EQ(model.weights_size(), 4);
  ASSERT_EQ(model.stacks_size(), 2);
  const v1::StackInfo& refused = model.stacks(0);
  EXPECT_EQ(refused.path(), "l.experts.*.down");
  EXPECT_EQ(refused.experts(), 0);
  EXPECT_EQ(refused.refused(),
            "stack \"l.experts.*.down\": expert 1: N: got 32, expected 16, as expert 0 has");
  const v1::StackInfo& stack = model.stacks(1);
  EXPECT_EQ(stack.path(), "l.experts.*.up");
  EXPECT_EQ(stack.refused(), "");
  EXPECT_EQ(stack.experts(), 2);
  EXPECT_EQ(stack.k(), 128);
  EXPECT_EQ(stack.n(), 16);
  EXPECT_EQ(stack.scheme(), "w4cz");
  EXPECT_EQ(stack.format(), "awq");
  EXPECT_EQ(stack.device(), "cpu");
  EXPECT_FALSE(stack.has_bias());
  EXPECT_EQ(model.weights(1).path(), "l.experts.0.up");
  EXPECT_EQ(stack.bytes(), model.weights(1).bytes() + model.weights(3).bytes());
}

TEST_F(RepositoryTest, UnloadsAndLoads) {
  v1::UnloadModelRequest unload;
  unload.set_name("tiny");
  v1::UnloadModelResponse unloaded;
  grpc::ClientContext a;
  ASSERT_TRUE(repository_->UnloadModel(&a, unload, &unloaded).ok());
  grpc::ClientContext b;
  EXPECT_EQ(repository_->UnloadModel(&b, unload, &unloaded).error_code(),
            grpc::StatusCode::NOT_FOUND);
  v1::QuantizedMatmulResponse response;
  EXPECT_EQ(Matmul(GoodMatmul(), &response).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::LoadModelRequest load;
  load.set_name("tiny");
  v1::LoadModelResponse loaded;
  grpc::ClientContext c;
  ASSERT_TRUE(repository_->LoadModel(&c, load, &loaded).ok());
  EXPECT_EQ(loaded.model().version(), 2);
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
}

// A client that calls too early must not conclude that the name is wrong; weights behave the same.
TEST_F(RepositoryTest, ModelsThatMayStillComeAreUnavailable) {
  v1::GetModelRequest request;
  request.set_name("later");
  for (const bool starting : {true, false}) {
    server_->SetStarting(starting);
    grpc::ClientContext context;
    v1::GetModelResponse model;
    const grpc::Status status = repository_->GetModel(&context, request, &model);
    EXPECT_EQ(status.error_code(),
              starting ? grpc::StatusCode::UNAVAILABLE : grpc::StatusCode::NOT_FOUND);
  }
}

TEST_F(RepositoryTest, NamesAreCheckedFirst) {
  for (const char* name : {"", "..", "../tiny", "/etc", ".hidden", "a/b", " "}) {
    v1::LoadModelRequest load;
    load.set_name(name);
    v1::LoadModelResponse loaded;
    grpc::ClientContext a;
    const grpc::Status status = repository_->LoadModel(&a, load, &loaded);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << name;
    EXPECT_THAT(status.error_message(), HasSubstr("name"));
    v1::UnloadModelRequest unload;
    unload.set_name(name);
    v1::UnloadModelResponse unloaded;
    grpc::ClientContext b;
    EXPECT_EQ(repository_->UnloadModel(&b, unload, &unloaded).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
    v1::GetModelRequest get;
    get.set_name(name);
    v1::GetModelResponse model;
    grpc::ClientContext c;
    EXPECT_EQ(repository_->GetModel(&c, get, &model).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
  v1::LoadModelRequest load;
  load.set_name("absent");
  v1::LoadModelResponse loaded;
  grpc::ClientContext context;
  EXPECT_EQ(repository_->LoadModel(&context, load, &loaded).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(RepositoryTest, AFailedLoadSaysWhyAndChangesNothing) {
  std::ofstream(root_ / "tiny" / "config.json") << "{ not json";
  v1::LoadModelRequest load;
  load.set_name("tiny");
  v1::LoadModelResponse loaded;
  grpc::ClientContext context;
  EXPECT_EQ(repository_->LoadModel(&context, load, &loaded).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
}

// A reply with a string that is not UTF-8 does not parse, so one such model would hide all models.
TEST_F(RepositoryTest, ListsWhateverFilesAreCalled) {
  std::ofstream(root_ / "tiny" / "caf\xe9.safetensors") << "no checkpoint";
  v1::LoadModelRequest load;
  load.set_name("tiny");
  v1::LoadModelResponse loaded;
  grpc::ClientContext load_context;
  EXPECT_EQ(repository_->LoadModel(&load_context, load, &loaded).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  grpc::ClientContext list_context;
  v1::ListModelsResponse list;
  const grpc::Status status = repository_->ListModels(&list_context, {}, &list);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(list.models_size(), 1);
  EXPECT_THAT(list.models(0).message(), HasSubstr("caf\\xe9.safetensors"));
}

// A loop of one thread, and a disk that does not answer until the test allows it.
class SlowDiskTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->rpc_threads = 1; }
};

TEST_F(SlowDiskTest, AListHoldsNoOtherCallUp) {
  std::promise<void> begun, release;
  std::atomic<int> entries{0};
  ReaddirHook() = [&](DIR* directory, ReadDirectory real) {
    if (entries++ == 0) {
      begun.set_value();
      release.get_future().wait();
    }
    return real(directory);
  };
  v1::ListModelsResponse list;
  auto listing = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    return repository_->ListModels(&context, {}, &list).ok();
  });
  begun.get_future().wait();
  grpc::ClientContext context;
  Deadline(&context);
  v1::GetModelRequest get;
  get.set_name("tiny");
  v1::GetModelResponse model;
  const grpc::Status status = repository_->GetModel(&context, get, &model);
  EXPECT_TRUE(status.ok()) << status.error_message();
  release.set_value();
  EXPECT_TRUE(listing.get());
  EXPECT_EQ(list.models_size(), 1);
  ReaddirHook() = nullptr;
}

TEST_F(RepositoryTest, ServerInfoTellsDeviceKernelsAndLimits) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(v1::ServerInfo::NewStub(channel_)->GetServerInfo(&context, {}, &info).ok());
  EXPECT_FALSE(info.version().empty());
  ASSERT_EQ(info.devices_size(), 1);
  EXPECT_EQ(info.shard(), "replicas");
  EXPECT_EQ(info.devices(0).id(), "cpu");
  EXPECT_TRUE(info.devices(0).healthy());
  EXPECT_GT(info.devices(0).weights_bytes(), 0);
  EXPECT_EQ(info.limits().max_receive_bytes(), kMessageLimit);
  EXPECT_EQ(info.limits().token_threshold(), 256);
  EXPECT_THAT(info.formats(), ::testing::IsSupersetOf({"awq", "plain", "fastertransformer"}));
  bool reference = false;
  int integers = 0, quantized = 0;
  for (const v1::KernelInfo& kernel : info.kernels()) {
    EXPECT_EQ(kernel.available(), kernel.reason().empty()) << kernel.name();
    const bool fp8 = kernel.operation().ends_with("_fp8");
    const bool vectors = kernel.bits().empty() && !fp8;
    EXPECT_THAT(kernel.zeros(), ::testing::Contains(vectors || fp8 ? "constant" : "stored"))
        << kernel.name();
    if (kernel.name() == "cpu/qmatmul_a8_scaled") {
      EXPECT_THAT(kernel.zeros(), ::testing::Contains("offset"));
    }
    if (kernel.operation() == "matmul_a8") {
      ++quantized;
      EXPECT_THAT(kernel.activations(), ::testing::ElementsAre("FP16", "BF16", "FP32", "INT8"));
      EXPECT_THAT(kernel.outputs(), ::testing::ElementsAre("FP16", "BF16", "FP32"));
    } else if (testing::Value(kernel.activations(), ::testing::Contains("INT8"))) {
      ++integers;
      EXPECT_THAT(kernel.scales(), ::testing::IsEmpty()) << kernel.name();
      EXPECT_THAT(kernel.outputs(), ::testing::ElementsAre("INT32")) << kernel.name();
    } else if (vectors) {
      EXPECT_THAT(kernel.scales(), ::testing::IsEmpty()) << kernel.name();
      EXPECT_EQ(kernel.available(), kernel.name().starts_with("cpu/")) << kernel.reason();
    } else {
      EXPECT_THAT(kernel.scales(), ::testing::Contains("FP16")) << kernel.name();
    }
    if (kernel.needs() == "cpu") reference |= kernel.available();
  }
  EXPECT_TRUE(reference);
  EXPECT_GE(integers, 2) << "the CPU's, and the reference";
  EXPECT_GE(quantized, 2);
}

}  // namespace
}  // namespace awqd::services
