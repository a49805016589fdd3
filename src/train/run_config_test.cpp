#include "train/run_config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "core/error.h"

namespace agoq {
namespace {

RunConfig parse(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  return parse_run_config(toml, "run.toml", overrides);
}

// The message for a configuration that must be refused, one line of kind kInput.
std::string error_of(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  try {
    parse(toml, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    std::string text = error.what();
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  }
  return "accepted";
}

void expect_error(const std::string& toml, const std::string& expected,
                  const std::vector<std::string>& overrides = {}) {
  const std::string text = error_of(toml, overrides);
  EXPECT_NE(text.find(expected), std::string::npos) << "got: " << text << "\nexpected: " << expected;
}

// Another allowed value for a key.
Setting another(const ConfigKey& key, const RunConfig& config) {
  const Setting now = key.get(config);
  if (const auto* value = std::get_if<bool>(&now)) return !*value;
  if (const auto* value = std::get_if<double>(&now)) return *value + 0.0123456789012345;
  if (const auto* value = std::get_if<std::int64_t>(&now)) return *value + 2;
  if (std::holds_alternative<std::vector<std::string>>(now)) {
    return std::vector<std::string>{"a \"quoted\" path", "b\\c\n\x01", "\xC3\xA9"};
  }
  const std::size_t quote = key.allowed.find('"');
  if (key.allowed.rfind("one of", 0) == 0) {  // the first choice, or the second where it is the default
    const std::size_t end = key.allowed.find('"', quote + 1);
    std::string first = key.allowed.substr(quote + 1, end - quote - 1);
    if (first != std::get<std::string>(now)) return first;
    const std::size_t second = key.allowed.find('"', end + 1);
    return key.allowed.substr(second + 1, key.allowed.find('"', second + 1) - second - 1);
  }
  if (key.allowed.find("format") != std::string::npos) return std::string("int5/64/bf16/stochastic");
  return std::string("some \"text\"");
}

TEST(RunConfig, DefaultsPassAndComeBackFromTheirText) {
  const RunConfig defaults;
  EXPECT_NO_THROW(defaults.check());
  EXPECT_EQ(parse(""), defaults);
  EXPECT_EQ(parse(to_toml(defaults)), defaults);
}

TEST(RunConfig, EveryKeyChangesTheConfigAndComesBackFromItsText) {
  RunConfig all;
  for (const ConfigKey& key : config_keys()) {
    SCOPED_TRACE(key.full_name());
    RunConfig one;
    ASSERT_TRUE(key.set(one, another(key, one)));
    EXPECT_NE(one, RunConfig()) << "the key sets nothing";
    ASSERT_TRUE(key.set(all, another(key, all)));
  }
  // What belongs together after each key was changed by itself.
  all.model.heads = 6;
  all.model.kv_heads = 3;
  all.model.head_size = 6;
  all.model.segments = 2;
  all.model.hidden = 258;
  all.model.feed_forward = 706;
  all.data.holdout_index = 9;
  const std::string text = to_toml(all);
  EXPECT_EQ(parse(text), all) << text;
}

TEST(RunConfig, KeysAreUniqueDescribedAndGroupedBySection) {
  std::set<std::string> names;
  std::vector<std::string> sections;
  for (const ConfigKey& key : config_keys()) {
    EXPECT_TRUE(names.insert(key.full_name()).second) << key.full_name();
    EXPECT_FALSE(key.description.empty()) << key.full_name();
    EXPECT_FALSE(key.allowed.empty()) << key.full_name();
    if (sections.empty() || sections.back() != key.section) sections.push_back(key.section);
  }
  EXPECT_EQ(sections, (std::vector<std::string>{"model", "data", "train", "optimizer", "activations",
                                                "gradients", "parallel", "checkpoint", "run"}));
}

TEST(RunConfig, ReadsEveryKindOfValue) {
  const RunConfig config = parse(
      "[model]\nhidden = 512\nnorm = \"layernorm\"\ndtype = 'fp32'\ntied_embeddings = true\n"
      "[optimizer]\nlearning_rate = 2e-3\nweight_decay = 0\n"
      "[activations]\npolicy = \"uniform\"\nformat = \"paper-fp4\"\nqkv = \"int8/32/fp32\"\n"
      "[data]\npaths = [\"a\", \"b\"]\n");
  EXPECT_EQ(config.model.hidden, 512);
  EXPECT_EQ(config.model.norm, NormKind::kLayerNorm);
  EXPECT_EQ(config.model.dtype, ElementType::kFp32);
  EXPECT_TRUE(config.model.tied_embeddings);
  EXPECT_EQ(config.optimizer.learning_rate, 2e-3);
  EXPECT_EQ(config.optimizer.weight_decay, 0.0);
  EXPECT_EQ(config.activations.policy, SavePolicy::kUniform);
  EXPECT_EQ(config.activations.format, parse_format("bnbfp4/128/fp32"));
  EXPECT_EQ(config.activations.role_format[static_cast<std::size_t>(SlotRole::kQkv)],
            parse_format("int8/32/fp32"));
  EXPECT_EQ(config.activations.role_format[static_cast<std::size_t>(SlotRole::kGateUp)], std::nullopt);
  EXPECT_EQ(config.data.paths, (std::vector<std::string>{"a", "b"}));
}

TEST(RunConfig, OverridesComeLastAndNeedNoQuotes) {
  const std::string toml = "[train]\nsteps = 10\n[activations]\npolicy = \"agoq\"\nqkv = \"bf16\"\n";
  const RunConfig config = parse(
      toml, {"train.steps=20", "activations.policy=keep", "activations.qkv=policy", "train.steps = 30",
             "optimizer.learning_rate=1", "data.paths=a, b c", "run.directory=\"runs/x\"",
             "data.extensions=[\".a\", \".b\"]", "optimizer.moments_8bit=false"});
  EXPECT_EQ(config.run.steps, 30);
  EXPECT_EQ(config.activations.policy, SavePolicy::kKeep);
  EXPECT_EQ(config.activations.role_format[static_cast<std::size_t>(SlotRole::kQkv)], std::nullopt);
  EXPECT_EQ(config.optimizer.learning_rate, 1.0);
  EXPECT_EQ(config.data.paths, (std::vector<std::string>{"a", "b c"}));
  EXPECT_EQ(config.data.extensions, (std::vector<std::string>{".a", ".b"}));
  EXPECT_EQ(config.run.directory, "runs/x");
  EXPECT_FALSE(config.optimizer.moments_8bit);
}

TEST(RunConfig, UnknownNamesSuggestTheNearest) {
  expect_error("[model]\nhiden = 1\n", "run.toml:2: unknown key model.hiden; did you mean hidden?");
  expect_error("[modle]\nhidden = 1\n", "run.toml:1: unknown section [modle]; did you mean [model]?");
  expect_error("[model]\nsteps = 1\n", "run.toml:2: unknown key model.steps; steps belongs in [train]");
  expect_error("[checkpoint]\ntemperature = 1\n", "the keys of [checkpoint] are every, keep");
  expect_error("[sampling]\n", "unknown section [sampling]; the sections are model, data, train");
  expect_error("", "--set train.step=5: unknown key train.step; did you mean steps?", {"train.step=5"});
  expect_error("hidden = 1\n", "run.toml:1: hidden stands outside of a section");
}

TEST(RunConfig, RefusesParallelismThatDoesNotExist) {
  expect_error("[model]\nhidden = 256\n\n[parallel]\ntensor = 2\n",
               "run.toml:5: unknown key parallel.tensor; the keys of [parallel] are ranks, ");
  expect_error("", "unknown key parallel.tensor", {"parallel.tensor=2"});
}

TEST(RunConfig, RefusesValuesOutOfRangeWithPlaceAndRange) {
  expect_error("[model]\n\nlayers = 0\n",
               "run.toml:3: model.layers must be an integer from 1 to 100000, not 0");
  expect_error("[train]\nsteps = 1.5\n", "train.steps must be an integer from 1 to 2147483647, not 1.5");
  expect_error("[train]\nsteps = \"many\"\n", "not \"many\"");
  expect_error("[optimizer]\nbeta1 = 1.0\n",
               "optimizer.beta1 must be a number from 0 and below 1, not 1");
  expect_error("[optimizer]\nlearning_rate = 0\n", "must be a number above 0, not 0");
  expect_error("[optimizer]\nlearning_rate = inf\n", "must be a number above 0, not inf");
  expect_error("[optimizer]\nlearning_rate = nan\n", "must be a number above 0, not nan");
  expect_error("[run]\nseed = -1\n", "run.seed must be an integer from 0 to 9007199254740992, not -1");
  expect_error("[run]\nseed = 99999999999999999999\n", "run.seed must be an integer from 0");
  expect_error("[run]\ndirectory = \"\"\n", "run.directory must be a string that is not empty");
  expect_error("[model]\nnorm = \"batchnorm\"\n",
               "model.norm must be one of \"rmsnorm\", \"layernorm\", not \"batchnorm\"");
  expect_error("[data]\npaths = [1, 2]\n", "data.paths must be a list of strings that are not empty");
  expect_error("[data]\npaths = \"text\"\n", "data.paths must be a list of strings");
  expect_error("[model]\ntied_embeddings = 1\n", "model.tied_embeddings must be true or false, not 1");
  expect_error("[activations]\nformat = \"nf4/33/fp32\"\n", "run.toml:2: activations.format: ");
  expect_error("", "--set train.steps=many: train.steps must be an integer", {"train.steps=many"});
  expect_error("", "expected section.key=value", {"steps=5"});
}

TEST(RunConfig, RefusesKeysThatDoNotFitTogether) {
  expect_error("[model]\nkv_heads = 3\n", "run.toml: ");
  expect_error("[data]\nholdout_index = 20\n",
               "data.holdout_index is 20 and must be below data.holdout_every");
  expect_error("[activations]\nrecompute_layers = 6\n", "the model has 5 layers");
  expect_error("[optimizer]\nwarmup_steps = 101\n",
               "optimizer.warmup_steps is 101, more than train.steps");
  expect_error("[optimizer]\nschedule = \"warmup-stable-decay\"\nwarmup_steps = 60\ndecay_steps = 41\n",
               "optimizer.decay_steps is 41, but 40 of 100 steps remain");
  expect_error("[parallel]\nrequantise_shards = true\n",
               "parallel.requantise_shards is true and parallel.shard_optimizer false");
}

TEST(RunConfig, RefusesATimeoutThatNoRankCouldKeep) {
  for (const char* seconds : {"0", "-1.0", "0.99", "1e-9", "1e10", "1e300"}) {
    expect_error(fmt::format("[parallel]\ntimeout_seconds = {}\n", seconds),
                 "parallel.timeout_seconds must be a number from 1 to 1000000, not ");
  }
}

TEST(RunConfig, NamesRanksWithoutAMicroBatch) {
  RunConfig config;
  config.run.micro_batches = 4;
  config.parallel.ranks = 4;
  EXPECT_EQ(idle_ranks_of(config), "");
  config.parallel.ranks = 6;
  EXPECT_EQ(idle_ranks_of(config),
            "2 of 6 ranks compute nothing: a step has 4 micro-batches; raise train.micro_batches, or "
            "start fewer ranks");
}

TEST(RunConfig, SaysHowGradientsAreReduced) {
  RunConfig config;
  EXPECT_EQ(reduction_of(config), "quangrad");
  config.parallel.reduction.kind = GradientReduction::kLibrary;
  config.parallel.reduction.sharded = true;
  EXPECT_EQ(reduction_of(config), "library, optimizer sharded");
}

TEST(RunConfig, NamesTheSettingsThatAResumedRunChangedAndRefusesThoseThatItMayNot) {
  const RunConfig trained;
  EXPECT_TRUE(changes_on_resume(trained, trained, "run/config.toml").empty());
  for (const ConfigKey& key : config_keys()) {
    SCOPED_TRACE(key.full_name());
    RunConfig now;
    ASSERT_TRUE(key.set(now, another(key, now)));
    if (key.may_change_on_resume) {
      const std::vector<std::string> changes = changes_on_resume(trained, now, "run/config.toml");
      ASSERT_EQ(changes.size(), 1u);
      EXPECT_EQ(changes[0].rfind(key.full_name() + " ", 0), 0u) << changes[0];
      continue;
    }
    // What makes the stream and the state; a setting that only looks on is in none of these.
    EXPECT_TRUE((std::set<std::string>{"model", "data", "train", "optimizer", "gradients", "run"})
                    .contains(key.section));
    try {
      changes_on_resume(trained, now, "run/config.toml");
      ADD_FAILURE() << "it may change";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      const std::string text = error.what();
      EXPECT_EQ(text.rfind(key.full_name() + " is ", 0), 0u) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
  }
  RunConfig more_steps;
  more_steps.run.steps = 200;
  EXPECT_EQ(changes_on_resume(trained, more_steps, "c"),
            std::vector<std::string>{"train.steps 100 -> 200"});
}

TEST(RunConfig, RefusesNumbersBeyondTheRangeOfDouble) {
  const char* beyond = "optimizer.learning_rate must be a number above 0, not a number beyond the range";
  expect_error("[optimizer]\nlearning_rate = 1e400\n", beyond);
  expect_error("", beyond, {"optimizer.learning_rate=1e400"});
  expect_error("", "not a number beyond the range", {"optimizer.weight_decay=-1e400"});
  EXPECT_EQ(parse("[optimizer]\nlearning_rate = 1e300\n").optimizer.learning_rate, 1e300);
}

TEST(RunConfig, EchoesIntegersAsTheyWereWritten) {
  const std::string huge = "99999999999999999999";
  expect_error("[train]\nsteps = " + huge + "\n", "from 1 to 2147483647, not " + huge);
  expect_error("[train]\nsteps = -" + huge + "\n", "not -" + huge);
  expect_error("[train]\nsteps = 1_000_000_000_000_000_000_000 # many\n",
               "not 1_000_000_000_000_000_000_000");
  expect_error("[train]\nsteps = 0xFFFFFFFFFFFFFFFFFFFF\n", "not 0xFFFFFFFFFFFFFFFFFFFF");
  expect_error("[data]\npaths = [1, " + huge + "]\n", "not [1, " + huge + "]");
  expect_error("", "run.seed must be an integer from 0 to 9007199254740992, not " + huge,
               {"run.seed=" + huge});
  expect_error("", "not -" + huge, {"run.seed=-" + huge});
}

TEST(RunConfig, QuotesLongLinesInPart) {
  const std::string error = error_of("[train]\nsteps " + std::string(100000, '5') + "\n");
  EXPECT_NE(error.find("run.toml:2: not valid TOML: "), std::string::npos) << error;
  EXPECT_LT(error.size(), 400u);
  expect_error("[train]\nsteps = 0x\n",
               "run.toml:2: not valid TOML: not a whole hexadecimal integer; the line is: steps = 0x");
}

TEST(RunConfig, SaysWhatIsMissingWhereTheTextEnds) {
  for (const char* text : {"[data]\npaths = [\"a\",\n", "[data]\npaths = [\n\n"}) {
    const std::string error = error_of(text);
    EXPECT_NE(error.find("not valid TOML: "), std::string::npos) << error;
    EXPECT_NE(error.find("; the line is empty: close what a line before it begins"), std::string::npos)
        << error;
    EXPECT_EQ(error.find("the line is: "), std::string::npos) << error;
  }
}

TEST(RunConfig, RefusesTextThatNoFileCouldHold) {
  const char* expected = "must be text in UTF-8 without NUL characters";
  for (const std::string text : {"\xFF", "a\xC3", "\xC0\xAF", "\xE0\x80\xAF", "\xED\xA0\x80",
                                 "\xF5\x80\x80\x80", "\xF4\x90\x80\x80", "\x80"}) {
    expect_error("", expected, {"run.directory=" + text});
    expect_error("", expected, {"data.paths=a," + text});
  }
  expect_error("", expected, {std::string("run.directory=a\0b", 17)});
  expect_error("[run]\ndirectory = \"a\\u0000b\"\n", expected);
  for (const std::string text : {"\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x8C\x8D", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(parse("", {"run.directory=" + text}).run.directory, text);
  }
}

TEST(RunConfig, RefusesFormatsWithoutASign) {
  const char* expected = "cannot hold negative values";
  for (const char* key : {"gradients.format", "activations.format", "activations.qkv"}) {
    expect_error("", expected, {std::string(key) + "=dynamic8-unsigned/256/fp32"});
    EXPECT_NO_THROW(parse("", {std::string(key) + "=dynamic8/256/fp32"}));
  }
}

TEST(RunConfig, RefusesLlama3FactorsThatLeaveNoRamp) {
  const std::string llama3 = "[model]\nrope_scaling = \"llama3\"\nrope_high_frequency_factor = 4.0\n";
  const char* expected = "model.rope_low_frequency_factor is ";
  expect_error(llama3 + "rope_low_frequency_factor = 4.0\n", expected);
  expect_error(llama3 + "rope_low_frequency_factor = 5.0\n", expected);
  EXPECT_NO_THROW(parse(llama3 + "rope_low_frequency_factor = 3.9\n"));
}

TEST(RunConfig, RefusesSizesThatCannotBePlanned) {
  const std::string huge = "=9007199254740992";
  for (const char* key : {"model.hidden", "model.feed_forward"}) {
    expect_error("", "parameters, more than", {key + huge, "model.segments=1"});
  }
  for (const char* key : {"train.sequence", "train.micro_batch"}) {
    expect_error("", "tokens, more than", {key + huge});
  }
  expect_error("", "activations, more than", {"train.sequence=50000000", "model.layers=100"});
  expect_error("", "logits, more than",
               {"model.loss_chunk" + huge, "train.sequence=1000000", "model.vocabulary=2147483647"});
  expect_error("", "a step would have", {"train.micro_batches" + huge});
}

TEST(RunConfig, ExplainsWhatIsNotTomlInOneLineWithItsNumber) {
  expect_error("[model]\nhidden = \n", "run.toml:2: not valid TOML: missing value");
  expect_error("[model]\nnorm = rmsnorm\n", "run.toml:2: not valid TOML: ");
  expect_error("[model]\nhidden = 1\nhidden = 2\n", "already exists");
  expect_error("[model\n", "run.toml:1: not valid TOML: ");
  expect_error("\xFF\xFE", "run.toml:1: not valid TOML: ");
}

TEST(RunConfig, ReportsAFileThatCannotBeRead) {
  for (const std::string path : {"/nonexistent/run.toml", "/tmp"}) {
    try {
      load_run_config(path);
      ADD_FAILURE() << path << " was read";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_NE(std::string(error.what()).find(path + ": cannot be read"), std::string::npos)
          << error.what();
    }
  }
}

TEST(RunConfig, ReadsNoMoreThanAConfigurationMayHave) {
  try {
    load_run_config("/dev/zero");  // never ends
    ADD_FAILURE() << "/dev/zero was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_NE(std::string(error.what()).find("/dev/zero: has more than"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace agoq
