#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "checkpoint/durable_file.h"
#include "core/random.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ =
        fs::path(testing::TempDir()) / fmt::format("safetensors_{}_{}", info->name(), ::getpid());
    fs::create_directories(directory_);
    path_ = (directory_ / "model.safetensors").string();
  }
  void TearDown() override { fs::remove_all(directory_); }

  void write_raw(const std::string& bytes) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  /// A file with this header and `data` bytes behind it.
  void write_header(const std::string& header, std::size_t data) const {
    const std::uint64_t length = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    write_raw(bytes + header + std::string(data, 'x'));
  }
  std::string read_raw() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  /// The message with which opening the file fails.
  std::string error_of_open() const {
    try {
      const SafetensorsReader reader(path_);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      std::string text = error.what();
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
      EXPECT_NE(text.find(path_), std::string::npos) << text;
      return text;
    }
    ADD_FAILURE() << "the file was accepted";
    return "";
  }
  void expect_error(const std::string& header, std::size_t data, const std::string& part) const {
    write_header(header, data);
    const std::string text = error_of_open();
    EXPECT_NE(text.find(part), std::string::npos) << header << "\ngave: " << text;
  }

  fs::path directory_;
  std::string path_;
};

/// Tensors of every element type, odd sizes and an empty one, with bytes that are all different.
struct Sample {
  struct Item {
    std::string name;
    ElementType type;
    Shape shape;
    std::vector<std::byte> bytes;
  };
  std::vector<Item> items;
  SafetensorsMetadata metadata{{"format", "pt"}, {"note", "a \"quoted\" note\nof two lines, \xC3\xA9"}};

  Sample() {
    const std::pair<ElementType, Shape> kinds[] = {
        {ElementType::kUint8, {3}},       {ElementType::kFp32, {2, 5}},
        {ElementType::kBf16, {3, 1, 7}},  {ElementType::kFp64, {}},
        {ElementType::kFp16, {1, 1}},     {ElementType::kInt64, {2, 2, 1, 2}},
        {ElementType::kInt32, {4, 0, 2}}, {ElementType::kInt16, {9, 3}},
    };
    std::uint64_t next = 0;
    for (const auto& [type, shape] : kinds) {
      Item item{fmt::format("tensor.{}", name_of(type)), type, shape, {}};
      item.bytes.resize(static_cast<std::size_t>(shape.count()) * size_of(type));
      for (std::byte& byte : item.bytes) byte = static_cast<std::byte>(random_bits(RandomKey{}, next++));
      items.push_back(std::move(item));
    }
  }
  void write(const std::string& path) const {
    std::vector<SafetensorsSource> sources;
    for (const Item& item : items) {
      // In pieces of three bytes: a sink takes pieces of any size.
      sources.push_back({item.name, item.type, item.shape, [&item](const ByteSink& sink) {
                           for (std::size_t at = 0; at < item.bytes.size(); at += 3) {
                             sink(&item.bytes[at], std::min<std::size_t>(3, item.bytes.size() - at));
                           }
                         }});
    }
    write_safetensors(path, sources, metadata);
  }
};

TEST_F(Safetensors, ReadsBackEveryTypeAsWritten) {
  const Sample sample;
  sample.write(path_);
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.metadata(), sample.metadata);
  ASSERT_EQ(reader.entries().size(), sample.items.size());
  for (const Sample::Item& item : sample.items) {
    const SafetensorsEntry& entry = reader.entry(item.name, item.type, item.shape);
    EXPECT_EQ(entry.begin % size_of(item.type), 0u) << item.name << " is not aligned";
    std::vector<std::byte> bytes(entry.bytes());
    reader.read(entry, bytes.data());
    EXPECT_EQ(bytes, item.bytes) << item.name;
  }
  EXPECT_FALSE(fs::exists(path_ + ".tmp"));
}

TEST_F(Safetensors, ReadsRows) {
  std::vector<float> values(35);
  std::iota(values.begin(), values.end(), 0.0f);
  write_safetensors(path_,
                    {safetensors_source("a", {reinterpret_cast<std::byte*>(values.data()),
                                              ElementType::kFp32, Shape{7, 5}})},
                    {});
  const SafetensorsReader reader(path_);
  std::vector<float> rows(10);
  reader.read_rows(reader.entry("a"), 3, 5, rows.data());
  EXPECT_EQ(rows, std::vector<float>(values.begin() + 15, values.begin() + 25));
  reader.read_rows(reader.entry("a"), 7, 7, rows.data());
  EXPECT_THROW(reader.read_rows(reader.entry("a"), 6, 8, rows.data()), Error);
  EXPECT_THROW(reader.read_bytes(reader.entry("a"), 0, 141, rows.data()), Error);
}

TEST_F(Safetensors, ReadsWhatPythonWrote) {
  // scripts/make_llama_golden.py, function python_sample.
  const SafetensorsReader reader(AGOQ_TEST_DATA "/python_sample.safetensors");
  EXPECT_EQ(reader.metadata().at("writer").substr(0, 11), "safetensors");
  double fp64[2];
  reader.read(reader.entry("fp64", ElementType::kFp64, Shape{2}), fp64);
  EXPECT_EQ(fp64[0], 1.0 / 3.0);
  EXPECT_EQ(fp64[1], -1e300);
  float fp32[6];
  reader.read(reader.entry("fp32", ElementType::kFp32, Shape{2, 3}), fp32);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(fp32[i], static_cast<float>(i) / 8.0f);
  Bf16 bf16[3];
  reader.read(reader.entry("bf16", ElementType::kBf16, Shape{3, 1}), bf16);
  EXPECT_EQ(to_float(bf16[0]), 1.5f);
  EXPECT_EQ(to_float(bf16[1]), -2.0f);
  EXPECT_EQ(to_float(bf16[2]), 0x1p100f);
  Fp16 fp16[2];
  reader.read(reader.entry("fp16", ElementType::kFp16, Shape{2}), fp16);
  EXPECT_EQ(to_float(fp16[0]), 65504.0f);
  EXPECT_EQ(to_float(fp16[1]), 0x1p-24f);
  std::int64_t int64[1];
  reader.read(reader.entry("int64", ElementType::kInt64, Shape{1}), int64);
  EXPECT_EQ(int64[0], -(std::int64_t{1} << 40));
  std::int32_t int32[2];
  reader.read(reader.entry("int32", ElementType::kInt32, Shape{2}), int32);
  EXPECT_EQ(int32[1], 2147483647);
  std::int16_t int16[2];
  reader.read(reader.entry("int16", ElementType::kInt16, Shape{2}), int16);
  EXPECT_EQ(int16[0], -32768);
  std::uint8_t uint8[4];
  reader.read(reader.entry("uint8", ElementType::kUint8, Shape{2, 2}), uint8);
  EXPECT_EQ(uint8[3], 255);
  EXPECT_EQ(reader.entry("scalar").shape, Shape{});
  EXPECT_EQ(reader.entry("empty").bytes(), 0u);
}

TEST_F(Safetensors, NamesFileAndTensorInErrors) {
  const std::string f32 = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  EXPECT_NO_THROW(write_header("{\"a\":{" + f32 + "}}  ", 8); SafetensorsReader reader(path_));

  write_raw("1234567");
  EXPECT_NE(error_of_open().find("7 bytes"), std::string::npos);
  write_raw(std::string(8, '\xFF'));
  EXPECT_NE(error_of_open().find("18446744073709551615"), std::string::npos);
  expect_error("", 0, "JSON is broken");
  expect_error("[]", 0, "not a JSON object");
  expect_error("{\"a\":{" + f32 + "}", 8, "JSON is broken");
  expect_error("{\"a\xFF\":{" + f32 + "}}", 8, "JSON is broken");
  expect_error("{\"a\":{" + f32 + "}}", 7, "cut short");
  expect_error("{\"a\":{" + f32 + "}}", 9, "8 bytes of data and 9 are there");
  expect_error("{\"a\":{" + f32 + "},\"a\":{" + f32 + "}}", 8, "'a' stands twice");
  expect_error(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8,
               "'dtype' stands twice");
  expect_error("{\"a\":{" + f32 + "},\"b\":{" + f32 + "}}", 8, "'b' overlaps");
  expect_error(R"({"a\nb":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8,
               "'a?b' has dtype 'F31'");
  expect_error(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8,
               "'a' of F32 [3] takes 12");
  expect_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12,
               "4 bytes in front of tensor 'a'");
  expect_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "'a' has data_offsets");
  expect_error(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "'a' has an extent");
  expect_error(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "'a' has an extent");
  expect_error(R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]}})", 8,
               "an extent");
  expect_error(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,1],"data_offsets":[0,0]}})", 0,
               "more bytes");
  expect_error(R"({"a":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0,
               "more bytes");
  expect_error(R"({"a":{"dtype":"F32","shape":[1,1,1,1,2],"data_offsets":[0,8]}})", 8, "5 dimensions");
  expect_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8, "exactly dtype");
  expect_error(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "exactly dtype");
  expect_error(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8, "exactly dtype");
  expect_error(R"({"a":7})", 8, "exactly dtype");
  expect_error(R"({"__metadata__":[]})", 0, "__metadata__");
  expect_error(R"({"__metadata__":{"k":1}})", 0, "'k' in __metadata__");
  expect_error(R"({"a":{"dtype":"F32","shape":[[[2]]],"data_offsets":[0,8]}})", 8, "nested");
  expect_error(std::string(200'000, '['), 0, "nested");

  fs::remove(path_);
  EXPECT_NE(error_of_open().find("cannot open"), std::string::npos);
  fs::create_directory(path_);
  EXPECT_NE(error_of_open().find("not a regular file"), std::string::npos);
}

TEST_F(Safetensors, RefusesAMissingTensorAndAWrongShape) {
  Sample().write(path_);
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.find("absent"), nullptr);
  EXPECT_THROW(reader.entry("absent"), Error);
  EXPECT_THROW(reader.entry("tensor.fp32", ElementType::kFp32, Shape{5, 2}), Error);
  EXPECT_THROW(reader.entry("tensor.fp32", ElementType::kInt32, Shape{2, 5}), Error);
}

/// A file in memory, so that thousands of versions of it cost no disk.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("safetensors_test", MFD_CLOEXEC)) {}
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }
  void write(const std::string& bytes) const {
    const auto size = static_cast<off_t>(bytes.size());
    ASSERT_EQ(::ftruncate(descriptor_, size), 0);
    ASSERT_EQ(::pwrite(descriptor_, bytes.data(), bytes.size(), 0), size);
  }

 private:
  int descriptor_;
};

/// Opens and reads everything; anything but success or an Error escapes. True if it was accepted.
bool read_all(const std::string& path) {
  try {
    const SafetensorsReader reader(path);
    for (const SafetensorsEntry& entry : reader.entries()) {
      std::vector<std::byte> bytes(entry.bytes());
      reader.read(entry, bytes.data());
    }
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
    return false;
  }
}

TEST_F(Safetensors, RefusesEveryTruncation) {
  Sample().write(path_);
  const std::string whole = read_raw();
  const MemoryFile file;
  for (std::size_t length = 0; length < whole.size(); ++length) {
    file.write(whole.substr(0, length));
    EXPECT_FALSE(read_all(file.path()))
        << "accepted at " << length << " of " << whole.size() << " bytes";
  }
  file.write(whole + "x");
  EXPECT_FALSE(read_all(file.path())) << "accepted with a byte too many";
}

TEST_F(Safetensors, SurvivesFlippedBytes) {
  Sample().write(path_);
  const std::string whole = read_raw();
  const MemoryFile file;
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, whole.data(), 8);
  const std::size_t front = 8 + header_bytes;
  int refused = 0;
  // Every single bit of length and header, then several bytes at once.
  for (std::size_t at = 0; at < front; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string broken = whole;
      broken[at] = static_cast<char>(broken[at] ^ (1 << bit));
      file.write(broken);
      refused += read_all(file.path()) ? 0 : 1;
    }
  }
  // Most flips change a name, which is as good as another; all flips of the length must be refused
  // but those that fall into the padding.
  EXPECT_GT(refused, static_cast<int>(front));
  RandomKey key;
  std::uint64_t next = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string broken = whole;
    const std::uint32_t flips = 1 + random_bits(key, next++) % 6;
    for (std::uint32_t flip = 0; flip < flips; ++flip) {
      const std::size_t at = random_bits(key, next++) % front;
      const char digits[] = "0123456789[]{},:\"-.e\\";
      const std::uint32_t choice = random_bits(key, next++);
      broken[at] =
          choice % 3 == 0 ? static_cast<char>(choice >> 8) : digits[(choice >> 8) % (sizeof digits - 1)];
    }
    file.write(broken);
    read_all(file.path());
  }
}

TEST_F(Safetensors, LeavesTheOldFileWhenWritingFails) {
  Sample().write(path_);
  const std::string whole = read_raw();
  const auto fewer = [](const ByteSink& sink) { sink("abc", 3); };
  const auto more = [](const ByteSink& sink) { sink("abcde", 5); };
  EXPECT_THROW(write_safetensors(path_, {{"a", ElementType::kUint8, Shape{4}, fewer}}, {}), Error);
  EXPECT_THROW(write_safetensors(path_, {{"a", ElementType::kUint8, Shape{4}, more}}, {}), Error);
  EXPECT_THROW(write_safetensors(path_,
                                 {{"a", ElementType::kUint8, Shape{3}, fewer},
                                  {"a", ElementType::kUint8, Shape{3}, fewer}},
                                 {}),
               Error);
  EXPECT_THROW(write_safetensors(path_, {{"__metadata__", ElementType::kUint8, Shape{3}, fewer}}, {}),
               Error);
  EXPECT_THROW(write_safetensors(path_, {{"\xFF", ElementType::kUint8, Shape{3}, fewer}}, {}), Error);
  EXPECT_EQ(read_raw(), whole);
  EXPECT_FALSE(fs::exists(path_ + ".tmp"));
  EXPECT_THROW(write_safetensors((directory_ / "absent" / "a").string(), {}, {}), Error);
}

TEST_F(Safetensors, WritesTheSameBytesForTheSameContent) {
  Sample().write(path_);
  const std::string first = read_raw();
  Sample().write(path_);
  EXPECT_EQ(read_raw(), first);
}

}  // namespace
}  // namespace agoq
