// SPDX-License-Identifier: Apache-2.0
#include <cxxabi.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "cli/format.hpp"
#include "cli/record_parts.hpp"

namespace flash3::cli {
namespace {

// A fat binary, as nvcc puts one for each source file into the section .nv_fatbin: this header,
// then entries.
struct FatBinaryHeader {
  uint32_t magic;
  uint16_t version, header_size;
  uint64_t size;  // of the entries
};
struct FatBinaryEntry {
  uint16_t kind, version;
  uint32_t header_size;
  uint64_t size;  // of what follows the header
  uint32_t compressed_size, unknown, version_of_isa, arch;
  uint32_t source_offset, source_size;  // the path of the source file, inside the header
};
constexpr uint32_t kFatBinaryMagic = 0xBA55ED50;
constexpr uint16_t kMachineCode = 2;  // an ELF file; 1: PTX

[[noreturn]] void unreadable(const std::string& why) {
  throw std::runtime_error("cannot read the kernels in the program: " + why);
}

std::string_view part(std::string_view bytes, uint64_t offset, uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset)
    unreadable(format("{} bytes at {} reach past the end at {}", size, offset, bytes.size()));
  return bytes.substr(offset, size);
}

template <class Struct>
Struct read(std::string_view bytes, uint64_t offset) {
  Struct value;
  std::memcpy(&value, part(bytes, offset, sizeof value).data(), sizeof value);
  return value;
}

struct Section {
  std::string_view name, bytes;  // no bytes where the file holds none (NOBITS)
  uint64_t size;
};

std::vector<Section> sections_of(std::string_view elf) {
  if (!elf.starts_with(ELFMAG)) unreadable("no ELF file where one belongs; is it compressed?");
  const auto header = read<Elf64_Ehdr>(elf, 0);
  std::vector<Elf64_Shdr> headers;
  for (uint64_t i = 0; i < header.e_shnum; ++i)
    headers.push_back(read<Elf64_Shdr>(elf, header.e_shoff + i * sizeof(Elf64_Shdr)));
  if (header.e_shstrndx >= headers.size()) unreadable("its sections have no names");
  const Elf64_Shdr& names_at = headers[header.e_shstrndx];
  const std::string_view names = part(elf, names_at.sh_offset, names_at.sh_size);
  std::vector<Section> sections;
  for (const Elf64_Shdr& s : headers) {
    const std::string_view name = part(names, s.sh_name, names.size() - s.sh_name);
    sections.push_back(
        {name.substr(0, name.find('\0')),
         s.sh_type == SHT_NOBITS ? std::string_view() : part(elf, s.sh_offset, s.sh_size),
         s.sh_size});
  }
  return sections;
}

// FNV-1a: it is to notice a change, not to resist an attacker.
class Hash {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  }
  void add(uint64_t n) { add({reinterpret_cast<const char*>(&n), sizeof n}); }
  std::string text() const { return format("{:016x}", state_); }

 private:
  uint64_t state_ = 0xCBF29CE484222325;
};

// What runs when the kernel does, in an order that does not depend on the file's: its own sections
// by kind, then those that it shares with the file's other kernels.
std::string hash_of(const std::vector<Section>& sections, std::string_view function) {
  std::map<std::string, const Section*> covered;
  const std::string suffix = format(".{}", function);
  for (const Section& s : sections) {
    std::string_view kind = s.name;
    const bool own = kind.ends_with(suffix);
    if (own) kind.remove_suffix(suffix.size());
    const bool constants = kind.starts_with(".nv.constant") && kind.rfind('.') == 3;
    if (own ? kind == ".text" || kind == ".nv.shared" || constants
            : kind == ".nv.global.init" || constants)
      covered[format("{}{}", kind, own ? "" : ", shared")] = &s;
  }
  Hash hash;
  for (const auto& [kind, section] : covered) {
    hash.add(kind);
    hash.add(section->size);
    hash.add(section->bytes);
  }
  return hash.text();
}

// "preprocess_kernel<(Element)1, 8, 64>", "forward_kernel<ForwardConfig{128, 128, true, ...},
// (Element)1>": without return type, parameters and our namespaces. An
// unnamed namespace, whose spelling has a hash of the file's path in it, is among these.
std::string readable(const std::string& function) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(function.c_str(), nullptr, nullptr, &status), &std::free);
  if (status != 0) return function;
  std::string name = text.get();
  for (const char* dropped :
       {"flash3::cuda::sm90::", "flash3::cuda::", "flash3::", "(anonymous namespace)::"})
    for (size_t at = 0; (at = name.find(dropped)) != std::string::npos;)
      name.erase(at, std::strlen(dropped));
  // What a row of a tile table leaves out of its kernel's type (compiled()).
  constexpr std::string_view kNoNumber = ", (double)[0000000000000000]";
  for (size_t at = 0; (at = name.find(kNoNumber)) != std::string::npos;)
    name.erase(at, kNoNumber.size());
  if (name.starts_with("void ")) name.erase(0, 5);
  int open = 0;  // the parameters are the parenthesis that the last one closes
  for (size_t i = name.size(); i-- > 0 && name.ends_with(')');) {
    open += name[i] == ')' ? 1 : name[i] == '(' ? -1 : 0;
    if (open == 0) name.erase(i);
  }
  return name;
}

void add_kernels(std::string_view elf, const std::string& source, std::vector<KernelCode>* all) {
  constexpr std::string_view kText = ".text.";
  const std::vector<Section> sections = sections_of(elf);
  std::vector<KernelCode> kernels;
  for (const Section& s : sections) {
    if (!s.name.starts_with(kText)) continue;
    const std::string function(s.name.substr(kText.size()));
    kernels.push_back({readable(function), function, source, hash_of(sections, function)});
  }
  // A file of instances is called after its rows, which do not tell what its kernels are.
  if (kernels.size() == 1 && source.find("/instances/") == std::string::npos) {
    const size_t stem = source.rfind('/') + 1;
    kernels[0].name = source.substr(stem, source.rfind('.') - stem);
  }
  std::move(kernels.begin(), kernels.end(), std::back_inserter(*all));
}

// The kernels of one source file.
void add_fat_binary(std::string_view entries, std::vector<KernelCode>* all) {
  for (uint64_t at = 0; at < entries.size();) {
    const auto entry = read<FatBinaryEntry>(entries, at);
    const std::string_view header = part(entries, at, entry.header_size);
    const std::string_view body = part(entries, at + entry.header_size, entry.size);
    if (entry.header_size < sizeof entry) unreadable("a fat binary's entry has too short a header");
    at += entry.header_size + entry.size;
    if (entry.kind != kMachineCode) continue;
    std::string_view source = part(header, entry.source_offset, entry.source_size);
    source = source.substr(0, source.find('\0'));
    if (!source.ends_with(".cu"))
      unreadable(
          "a fat binary does not say which file it is from; our build tells nvcc (-Xfatbin "
          "--ident)");
    if (const size_t ours = source.rfind("src/cuda/"); ours != std::string_view::npos)
      add_kernels(body, std::string(source.substr(ours)), all);
  }
}

}  // namespace

std::vector<KernelCode> machine_code(std::string_view program) {
  std::vector<KernelCode> all;
  for (const Section& section : sections_of(program)) {
    if (section.name != ".nv_fatbin") continue;
    for (uint64_t at = 0; at + sizeof(FatBinaryHeader) <= section.size;) {
      const auto header = read<FatBinaryHeader>(section.bytes, at);
      if (header.magic == 0) {  // a gap between two, which begin at multiples of 8
        at += 8;
        continue;
      }
      if (header.magic != kFatBinaryMagic || header.header_size < sizeof header)
        unreadable(format("no fat binary at {} of its section", at));
      add_fat_binary(part(section.bytes, at + header.header_size, header.size), &all);
      at += header.header_size + header.size;
    }
    if (all.empty()) unreadable("none of its fat binaries is from src/cuda");
  }
  std::sort(all.begin(), all.end(),
            [](const KernelCode& a, const KernelCode& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(all.begin(), all.end(),
                         [](const KernelCode& a, const KernelCode& b) { return a.name == b.name; });
  if (twice != all.end()) unreadable(format("two kernels have the name {}", twice->name));
  return all;
}

std::vector<KernelCode> own_machine_code() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string program{std::istreambuf_iterator<char>(file), {}};
  if (!file) unreadable("/proc/self/exe cannot be read");
  return machine_code(program);
}

const char* kernel_compiler() {
#ifdef FLASH3_NVCC_VERSION
  return FLASH3_NVCC_VERSION;
#else
  return "";
#endif
}

}  // namespace flash3::cli
