// The inference protocol's lists, loads, configuration, counts and settings.
#include <string>
#include <vector>

#include "server/services/oip/models.h"
#include "tests/server/services/oip_fixture.h"

namespace awqd::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class OipRepositoryTest : public OipTest {
 protected:
  std::vector<std::string> Names(const inference::RepositoryIndexRequest& request = {}) {
    inference::RepositoryIndexResponse response;
    const grpc::Status status = Call(&Stub::RepositoryIndex, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::vector<std::string> names;
    for (const auto& model : response.models()) {
      names.push_back(model.name() + " " + model.version() + " " + model.state());
    }
    return names;
  }

  template <typename Request, typename Response>
  void ExpectCode(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, grpc::StatusCode code, const std::string& message) {
    Response response;
    const grpc::Status status = Call(method, request, &response);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(message));
  }
};

TEST_F(OipRepositoryTest, TheIndexHasTheNamesThatRequestsHave) {
  WriteTinyModel(root_ / "mlp", {{"a.gate_proj", 128},
                                 {"a.up_proj", 128},
                                 {"a.down_proj", 128},
                                 {"b.experts.0.up_proj", 16},
                                 {"b.experts.1.up_proj", 16}});
  EXPECT_THAT(Names(), ElementsAre("mlp  UNAVAILABLE", "tiny 1 READY", "tiny/layer 1 READY",
                                   "tiny/wide 1 READY"));
  ASSERT_TRUE(models_->Load("mlp").ok());
  EXPECT_THAT(Names(), ElementsAre("mlp 1 READY", "mlp/a.down_proj 1 READY",
                                   "mlp/a.gate_proj 1 READY", "mlp/a.up_proj 1 READY",
                                   "mlp/b.experts.*.up_proj 1 READY", "mlp/a:gated_mlp 1 READY",
                                   "tiny 1 READY", "tiny/layer 1 READY", "tiny/wide 1 READY"));
  ASSERT_TRUE(models_->Unload("mlp").ok());
  inference::RepositoryIndexRequest ready;
  ready.set_ready(true);
  EXPECT_THAT(Names(ready), ElementsAre("tiny 1 READY", "tiny/layer 1 READY", "tiny/wide 1 READY"));
  ready.set_repository_name("other");
  ExpectCode(&Stub::RepositoryIndex, ready, grpc::StatusCode::INVALID_ARGUMENT,
             "repository_name: got \"other\", expected nothing");
}

TEST_F(OipRepositoryTest, CallsShareTheBytesOfTheIndexUntilAModelChanges) {
  Env env;
  env.models = models_.get();
  oip::NameList names;
  const auto encoded = [&] {
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(names.Encoded(env, {})->Dump(&slices).ok());
    return slices.at(0);
  };
  const grpc::Slice first = encoded();
  EXPECT_EQ(encoded().begin(), first.begin());
  ASSERT_TRUE(models_->Load("tiny").ok());
  EXPECT_NE(encoded().begin(), first.begin());
}

TEST_F(OipRepositoryTest, ModelsAreLoadedAndUnloaded) {
  inference::RepositoryModelLoadRequest load;
  load.set_model_name("tiny");
  inference::RepositoryModelLoadResponse loaded;
  ASSERT_TRUE(Call(&Stub::RepositoryModelLoad, load, &loaded).ok());
  EXPECT_EQ((*models_->Find("tiny"))->version, 2);
  (*load.mutable_parameters())["config"].set_string_param("{}");
  ExpectCode(&Stub::RepositoryModelLoad, load, grpc::StatusCode::INVALID_ARGUMENT,
             "parameters: got 1, expected none");
  load.Clear();
  load.set_model_name("tiny/layer");
  ExpectCode(&Stub::RepositoryModelLoad, load, grpc::StatusCode::INVALID_ARGUMENT, "model name");
  load.set_model_name("other");
  ExpectCode(&Stub::RepositoryModelLoad, load, grpc::StatusCode::NOT_FOUND, "other");

  inference::RepositoryModelUnloadRequest unload;
  unload.set_model_name("tiny");
  (*unload.mutable_parameters())["x"].set_bool_param(true);
  ExpectCode(&Stub::RepositoryModelUnload, unload, grpc::StatusCode::INVALID_ARGUMENT,
             "parameters[x]");
  unload.clear_parameters();
  (*unload.mutable_parameters())["unload_dependents"].set_bool_param(true);
  inference::RepositoryModelUnloadResponse unloaded;
  ASSERT_TRUE(Call(&Stub::RepositoryModelUnload, unload, &unloaded).ok());
  EXPECT_FALSE(models_->Find("tiny").ok());
}

TEST_F(OipRepositoryTest, AModelThatSleepsIsReadyAndLoadedWhenItIsUsed) {
  const auto sleep = [&](int64_t version) { return models_->UnloadIdle("tiny", version, 0); };
  ASSERT_TRUE(sleep(1));
  inference::ModelReadyRequest request;
  request.set_name("tiny/layer");
  inference::ModelReadyResponse ready;
  ASSERT_TRUE(Call(&Stub::ModelReady, request, &ready).ok());
  EXPECT_TRUE(ready.ready());
  EXPECT_THAT(Names(), ElementsAre("tiny  READY"));
  EXPECT_TRUE(models_->IsUnloadedIdle("tiny")) << "none of these wakes it";
  Answered(GoodInfer());
  ASSERT_TRUE(sleep(2));
  inference::ModelInferRequest named = GoodInfer();
  named.set_model_version("3");
  Answered(named);  // the version that exists once it is loaded again
  ASSERT_TRUE(sleep(3));
  inference::ModelMetadataRequest metadata;
  metadata.set_name("tiny/layer");
  inference::ModelMetadataResponse described;
  ASSERT_TRUE(Call(&Stub::ModelMetadata, metadata, &described).ok());
  EXPECT_THAT(described.versions(), ElementsAre("4"));
}

TEST_F(OipRepositoryTest, TheConfigurationHasTheShapesOfOneToken) {
  inference::ModelConfigRequest request;
  request.set_name("tiny/layer");
  inference::ModelConfigResponse response;
  ASSERT_TRUE(Call(&Stub::ModelConfig, request, &response).ok());
  const inference::ModelConfig& config = response.config();
  EXPECT_EQ(config.name(), "tiny/layer");
  EXPECT_EQ(config.max_batch_size(), 2147483647) << "the fixture bounds no batch";
  ASSERT_EQ(config.input_size(), 1) << "tools want each of them in the metadata as well";
  EXPECT_EQ(config.input(0).name(), "x");
  EXPECT_EQ(config.input(0).data_type(), inference::TYPE_FP16);
  EXPECT_THAT(config.input(0).dims(), ElementsAre(128));
  EXPECT_THAT(config.output(0).dims(), ElementsAre(16));
  EXPECT_EQ(config.parameters().at("optional_inputs").string_value(), "bias,activation_scales");
  EXPECT_EQ(config.dynamic_batching().priority_levels(), 9u);
  EXPECT_EQ(config.parameters().at("scheme").string_value(), "w4cz");
  request.set_name("tiny/layer:dequantize");
  ASSERT_TRUE(Call(&Stub::ModelConfig, request, &response).ok());
  EXPECT_EQ(response.config().max_batch_size(), 0);
  EXPECT_EQ(response.config().input_size(), 0);
  EXPECT_THAT(response.config().output(0).dims(), ElementsAre(128, 16));
  request.set_name("tiny");
  ExpectCode(&Stub::ModelConfig, request, grpc::StatusCode::INVALID_ARGUMENT,
             "name: got \"tiny\", expected MODEL/WEIGHT");
}

TEST_F(OipRepositoryTest, StatisticsAreThoseOfTheModel) {
  model::ModelStatistics& use = *(*models_->Find("tiny"))->weights.at("layer")->statistics;
  use.requests = 5;
  use.failed = 2;
  use.tokens = 40;
  use.queue_ns = 7000;
  use.batches = 4;
  use.input_ns = 11;
  use.compute_ns = 12;
  use.answered = 3;
  use.output_ns = 13;
  use.succeeded = 6;
  use.succeeded_ns = 14;
  use.refused = 1;
  use.refused_ns = 15;
  use.sizes.AddComputed(65, 16, 17);
  use.sizes.AddComputed(128, 1, 1);
  use.sizes.AddAnswered(128, 18);
  const auto is = [](const inference::StatisticDuration& duration, uint64_t count, uint64_t ns) {
    return duration.count() == count && duration.ns() == ns;
  };
  for (const char* name : {"", "tiny", "tiny/layer"}) {
    inference::ModelStatisticsRequest request;
    request.set_name(name);
    inference::ModelStatisticsResponse response;
    ASSERT_TRUE(Call(&Stub::ModelStatistics, request, &response).ok()) << name;
    ASSERT_EQ(response.model_stats_size(), 1) << name;
    const inference::ModelStatistics& counts = response.model_stats(0);
    EXPECT_EQ(counts.name(), *name == '\0' ? "tiny" : name);
    EXPECT_EQ(counts.inference_count(), 40u);
    EXPECT_EQ(counts.execution_count(), 4u);
    const inference::InferStatistics& times = counts.inference_stats();
    EXPECT_TRUE(is(times.success(), 6, 14)) << times.DebugString();
    EXPECT_TRUE(is(times.fail(), 1, 15)) << times.DebugString();
    EXPECT_TRUE(is(times.queue(), 7, 7000)) << times.DebugString();
    EXPECT_TRUE(is(times.compute_input(), 5, 11)) << times.DebugString();
    EXPECT_TRUE(is(times.compute_infer(), 5, 12)) << times.DebugString();
    EXPECT_TRUE(is(times.compute_output(), 3, 13)) << times.DebugString();
    ASSERT_EQ(counts.batch_stats_size(), 1);
    const inference::InferBatchStatistics& batches = counts.batch_stats(0);
    EXPECT_EQ(batches.batch_size(), 128u);
    EXPECT_TRUE(is(batches.compute_input(), 2, 17)) << batches.DebugString();
    EXPECT_TRUE(is(batches.compute_infer(), 2, 18)) << batches.DebugString();
    EXPECT_TRUE(is(batches.compute_output(), 1, 18)) << batches.DebugString();
  }
  inference::ModelStatisticsRequest request;
  request.set_name("other");
  ExpectCode(&Stub::ModelStatistics, request, grpc::StatusCode::NOT_FOUND, "other");
}

TEST_F(OipRepositoryTest, RequestsAreCountedByHowTheyEnd) {
  Answered(GoodInfer());
  engine_.Refuse(absl::ResourceExhaustedError("the queue is full"));
  ExpectRefused(GoodInfer(), "full", grpc::StatusCode::RESOURCE_EXHAUSTED);
  engine_.Refuse(absl::OkStatus());
  engine_.Fail(absl::UnavailableError("no"));
  ExpectRefused(GoodInfer(), "no", grpc::StatusCode::UNAVAILABLE);
  inference::ModelInferRequest misshapen = GoodInfer();
  misshapen.mutable_inputs(0)->set_shape(1, 127);
  ExpectRefused(misshapen, "raw_input_contents[x]");
  inference::ModelStatisticsRequest request;
  request.set_name("tiny");
  inference::ModelStatisticsResponse response;
  ASSERT_TRUE(Call(&Stub::ModelStatistics, request, &response).ok());
  const inference::InferStatistics& times = response.model_stats(0).inference_stats();
  EXPECT_EQ(times.success().count(), 1u);
  EXPECT_GT(times.success().ns(), 0u);
  EXPECT_EQ(times.fail().count(), 2u) << "one never came as far as to the queue";
  EXPECT_GT(times.fail().ns(), 0u);
}

TEST_F(OipRepositoryTest, SettingsAreTold) {
  inference::TraceSettingRequest trace;
  (*trace.mutable_settings())["trace_level"];  // without a value: no change
  inference::TraceSettingResponse traces;
  ASSERT_TRUE(Call(&Stub::TraceSetting, trace, &traces).ok());
  EXPECT_THAT(traces.settings().at("trace_level").value(), ElementsAre("OFF"));
  (*trace.mutable_settings())["trace_file"].add_value("/tmp/x");
  ExpectCode(&Stub::TraceSetting, trace, grpc::StatusCode::INVALID_ARGUMENT,
             "settings[trace_file]: got a value, expected none");
  inference::LogSettingsRequest log;
  inference::LogSettingsResponse logs;
  ASSERT_TRUE(Call(&Stub::LogSettings, log, &logs).ok());
  EXPECT_TRUE(logs.settings().at("log_error").bool_param());
  (*log.mutable_settings())["log_info"].set_bool_param(false);
  ExpectCode(&Stub::LogSettings, log, grpc::StatusCode::INVALID_ARGUMENT, "settings[log_info]");
}

}  // namespace
}  // namespace awqd::services
