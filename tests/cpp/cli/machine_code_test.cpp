// SPDX-License-Identifier: Apache-2.0
// What a hash of a kernel's machine code covers, on programs that are put together here: the parts
// of an ELF file with a fat binary in it that the reader looks at.
#include <elf.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/record_parts.hpp"

namespace flash3::cli {
namespace {

struct Section {
  std::string name, bytes;
  bool in_file = true;
};

template <class Struct>
void append(const Struct& value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof value);
}

// An ELF file with these sections.
std::string elf(const std::vector<Section>& sections) {
  std::string names(1, '\0'), body;
  std::vector<Elf64_Shdr> headers(1);
  const auto add = [&](const std::string& name, const std::string& bytes, bool in_file) {
    Elf64_Shdr h{};
    h.sh_name = static_cast<Elf64_Word>(names.size());
    h.sh_type = in_file ? SHT_PROGBITS : SHT_NOBITS;
    h.sh_offset = sizeof(Elf64_Ehdr) + body.size();
    h.sh_size = bytes.size();
    headers.push_back(h);
    names += name + '\0';
    if (in_file) body += bytes;
  };
  for (const Section& s : sections) add(s.name, s.bytes, s.in_file);
  add(".shstrtab", "", true);
  headers.back().sh_offset = sizeof(Elf64_Ehdr) + body.size();
  headers.back().sh_size = names.size();
  body += names;
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_shoff = sizeof header + body.size();
  header.e_shnum = static_cast<Elf64_Half>(headers.size());
  header.e_shstrndx = static_cast<Elf64_Half>(headers.size() - 1);
  std::string file;
  append(header, &file);
  file += body;
  for (const Elf64_Shdr& h : headers) append(h, &file);
  return file;
}

// What nvcc makes of one source file; kind 2 is machine code.
std::string fat_binary(std::string source, const std::string& code, uint16_t kind = 2) {
  source += '\0';
  while (source.size() % 8 != 0) source += '\0';
  const auto header_size = static_cast<uint32_t>(64 + source.size());
  std::string entry;
  append(kind, &entry);
  append(uint16_t{0x101}, &entry);
  append(header_size, &entry);
  append(static_cast<uint64_t>(code.size()), &entry);
  for (const uint32_t word : {0u, 0u, 0x10008u, 90u, 64u, static_cast<uint32_t>(source.size())})
    append(word, &entry);
  entry.resize(64);
  entry += source + code;
  std::string file;
  append(uint32_t{0xBA55ED50}, &file);
  append(uint16_t{1}, &file);
  append(uint16_t{16}, &file);
  append(static_cast<uint64_t>(entry.size()), &file);
  return file + entry;
}

std::string program(const std::string& fat_binaries) {
  return elf({{".text", "host code"}, {".nv_fatbin", fat_binaries}});
}

// A program with one kernel, of these sections.
std::string hash_of(const std::vector<Section>& sections,
                    const std::string& source = "/x/src/cuda/sm90/forward/instances/fwd.cu") {
  const auto kernels = machine_code(program(fat_binary(source, elf(sections))));
  EXPECT_EQ(kernels.size(), 1u);
  EXPECT_EQ(kernels.at(0).hash.size(), 16u);
  return kernels.at(0).hash;
}

const std::vector<Section> kKernel = {
    {".debug_line", "line 1"},         {".nv.info.k", "attributes"},
    {".text.k", "instructions"},       {".nv.shared.k", std::string(64, ' '), false},
    {".nv.constant0.k", "parameters"}, {".nv.constant4", "of the file"},
    {".nv.global.init", "data"}};

TEST(MachineCode, HashCoversWhatRuns) {
  const std::string hash = hash_of(kKernel);
  for (const size_t i : {2, 4, 5, 6}) {
    auto changed = kKernel;
    changed[i].bytes.back() ^= 1;
    EXPECT_NE(hash_of(changed), hash) << kKernel[i].name;
  }
  auto larger = kKernel;
  larger[3].bytes += ' ';
  EXPECT_NE(hash_of(larger), hash) << "shared memory";
  auto moved = kKernel;  // bytes from one section to the next
  moved[2].bytes += moved[4].bytes.front();
  moved[4].bytes.erase(0, 1);
  EXPECT_NE(hash_of(moved), hash);
}

TEST(MachineCode, HashLeavesOutWhatDoesNotRun) {
  const std::string hash = hash_of(kKernel);
  auto other = kKernel;
  other[0].bytes = "line 200, of a longer file";
  other[1].bytes = "attributes with symbol 7";
  EXPECT_EQ(hash_of(other), hash) << "line information";
  other = {kKernel.rbegin(), kKernel.rend()};
  EXPECT_EQ(hash_of(other), hash) << "order";
  EXPECT_EQ(hash_of(kKernel, "/elsewhere/and/deeper/src/cuda/sm90/forward/instances/fwd.cu"), hash);
  other = kKernel;
  other.push_back({".text.k2", "another kernel"});
  const auto two = machine_code(program(fat_binary("src/cuda/a.cu", elf(other))));
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].hash, hash) << "a kernel beside it";
  EXPECT_NE(two[1].hash, hash);
}

TEST(MachineCode, Names) {
  const std::string unnamed = "_ZN6flash34cuda47_GLOBAL__N__bae8655b_14_packed_copy_cu_a738dea0";
  const std::string one = ".text." + unnamed + "11pack_kernelItEEvNS_10TensorViewES3_";
  const std::string other = ".text." + unnamed + "11pack_kernelIhEEvNS_10TensorViewES3_";
  const std::string alone = fat_binary("/a/src/cuda/sm90/forward/fwd_x.cu", elf({{one, "1"}}));
  const std::string pair = fat_binary("/a/src/cuda/pack_rows.cu", elf({{one, "2"}, {other, "3"}}));
  const std::string tool = fat_binary("/a/tools/device/ceiling.cu", elf({{".text.c", "4"}}));
  const std::string row =
      ".text._ZN6flash34cuda4sm9014forward_kernelINS1_10PoliciesOfIXtlNS1_13ForwardConfigELi128ELb1"
      "ELd0000000000000000ELd0000000000000000EEELNS0_7ElementE1EEEEEvNS1_13ForwardParamsE";
  const std::string rows =
      fat_binary("/a/src/cuda/sm90/forward/instances/forward_rows_9_to_9.cu", elf({{row, "5"}}));
  const std::string ptx = fat_binary("/a/src/cuda/p.cu", "text", 1);
  auto kernels = machine_code(program(tool + alone + std::string(8, '\0') + pair + rows + ptx));
  ASSERT_EQ(kernels.size(), 4u);
  EXPECT_EQ(kernels[0].name, "forward_kernel<PoliciesOf<ForwardConfig{128, true}, (Element)1> >");
  kernels.erase(kernels.begin());
  EXPECT_EQ(kernels[0].name, "fwd_x");
  EXPECT_EQ(kernels[0].source, "src/cuda/sm90/forward/fwd_x.cu");
  EXPECT_EQ(".text." + kernels[0].function, one);
  EXPECT_EQ(kernels[1].name, "pack_kernel<unsigned char>");
  EXPECT_EQ(kernels[2].name, "pack_kernel<unsigned short>");
}

// The message, or "" if it can be read.
std::string complaint(const std::string& bytes) {
  try {
    machine_code(bytes);
    return "";
  } catch (const std::runtime_error& e) {
    return e.what();
  }
}

TEST(MachineCode, SaysWhatItCannotRead) {
  const std::string good = fat_binary("src/cuda/a.cu", elf(kKernel));
  EXPECT_EQ(complaint(program(good)), "");
  EXPECT_NE(complaint("no program").find("no ELF file"), std::string::npos);
  EXPECT_NE(complaint(program(good.substr(0, good.size() - 9))).find("past the end"),
            std::string::npos);
  EXPECT_NE(complaint(program("something else, long enough")).find("no fat binary"),
            std::string::npos);
  EXPECT_NE(complaint(program(fat_binary("src/cuda/a.cu", "packed"))).find("compressed"),
            std::string::npos);
  EXPECT_NE(complaint(program(fat_binary("", elf(kKernel)))).find("--ident"), std::string::npos);
  EXPECT_NE(complaint(program(fat_binary("tools/t.cu", elf(kKernel)))).find("src/cuda"),
            std::string::npos);
  EXPECT_NE(complaint(program(good + good)).find("two kernels have the name a"), std::string::npos);
  const std::string whole = program(good);
  for (size_t size = 0; size + 1 < whole.size(); size += 7)
    EXPECT_NE(complaint(whole.substr(0, size)), "") << size << " bytes";
}

TEST(MachineCode, NoneWithoutCuda) {
  EXPECT_TRUE(machine_code(elf({{".text", "host code"}})).empty());
  EXPECT_TRUE(own_machine_code().empty());  // of this test
}

}  // namespace
}  // namespace flash3::cli
