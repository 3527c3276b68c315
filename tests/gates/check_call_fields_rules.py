#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/codegen/call_fields.py takes a field that a header gains everywhere, by what the header says of it alone, and refuses what it cannot
read."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools/codegen"))
import call_fields as generator  # noqa: E402
import calls  # noqa: E402

ENUM = """typedef enum flash3_side FLASH3_ENUM_INT32 {
  FLASH3_SIDE_LEFT = 0, /**< one */
  FLASH3_SIDE_FAR_RIGHT = 1
} flash3_side;
"""
FIELDS = """  int32_t side; /**< flash3_side, of each */
  /** 1: as it is. */
  int32_t plain;
  /** [heads_q] or [batch, heads_q] float32: of each head · key. Not with qv, tree_mask. On the CPU
   * alone. All zero: none. */
  flash3_tensor slopes;
"""
LIKE_IT = FIELDS.partition("  /** [heads_q]")[0] + "  flash3_tensor slopes; /**< as in flash3_forward_params */\n"


def with_fields(text, call, fields):
    end = f"}} flash3_{call}_params;"
    assert text.count(end) == 1
    return text.replace(end, fields + end)


class Added(unittest.TestCase):
    def setUp(self):
        text = generator.header_text() + ENUM
        self.before = generator.Headers(text)
        self.headers = generator.Headers(with_fields(with_fields(text, "forward", FIELDS), "backward", LIKE_IT))

    def made(self, make):
        return make(self.headers)

    def test_table(self):
        text = self.made(generator.field_table)
        self.assertEqual(text.count('FLASH3_FIELD(side, .words = "left far_right")'), 2)
        self.assertEqual(text.count("FLASH3_FIELD(plain, .is_flag = true)"), 2)
        self.assertEqual(text.count('FLASH3_FIELD(slopes, .dtype = FLASH3_FLOAT32, .shapes = "heads batch_heads", '
                                    '.without = "qv tree_mask", .is_cpu_alone = true)'), 2)
        self.assertEqual(text.count("&Params::slopes, problem.slopes)"), 2)

    def test_views(self):
        text = self.made(generator.added_views)
        self.assertEqual(text.count("  HeadsView slopes;\n"), 1)
        self.assertLess(text.index("slopes"), text.index("struct AddedForwardViews"))
        self.assertIn("LseView max_logits;", text)

    def test_case_ids(self):
        text = self.made(generator.case_ids)
        for line in ("/slopes=heads", "/slopes=batch_heads", "/max_logits=rows"):
            self.assertIn(f'"{line}"\n', text)

    def test_schemas(self):
        added = ", int side=0, bool plain=False, Tensor? slopes=None)"
        for operator, (call, _, options, _) in calls.TORCH.items():
            takes = call in ("forward", "backward") and "…" in options
            schema = generator.schema(self.headers, operator)
            self.assertEqual(schema.partition(" ->")[0].endswith(added), takes, schema)
            self.assertEqual(schema.replace(added, ")"), generator.schema(self.before, operator))

    def test_cpp(self):
        text = self.made(generator.cpp_structs)
        for line in ("flash3_side side = FLASH3_SIDE_LEFT;", "bool plain = false;", "Tensor slopes{};", "p.side = side;", "p.slopes = slopes;"):
            self.assertEqual(text.count(f"  {line}"), 2, line)

    def test_tvm_ffi(self):
        text = self.made(generator.tvm_signatures).replace('"\n    "', "")
        self.assertEqual(text.count("side plain slopes"), 3)  # and of a call on a cache

    def test_what_a_list_places_comes_once(self):
        names = list(self.headers.expanded("forward", "q mask_alignment mask …", True))
        added = [f.name for f in self.before.added("forward") if f.name not in ("mask_alignment", "mask")]
        self.assertEqual(names, ["q", "mask_alignment", "mask", *added, "side", "plain", "slopes"])

    def test_python(self):
        made = {}
        exec(self.made(generator.python_fields), made)
        self.assertEqual(made["WORDS"]["side"], {"left": 0, "far_right": 1})
        self.assertEqual(made["OPTIONS"]["backward"]["side"], "enumeration")
        self.assertIn("slopes", made["TENSORS"]["forward"])
        self.assertEqual(made["DTYPE_OF"]["slopes"], "float32")
        self.assertEqual(made["ADDED"]["backward"]["slopes"], "heads batch_heads")
        self.assertEqual(made["ABOUT"]["slopes"], "[heads_q] or [batch, heads_q] float32: of each head * key. Not with qv, tree_mask. On the CPU "
                                                  "alone. None: none.")
        for function in made["SIGNATURES"].values():
            self.assertEqual([function[name] for name in ("side", "plain", "slopes")], ["left", False, None])
        self.assertEqual(made["ForwardParams"]._fields_[-1][0], "slopes")

    def test_results_are_for_given_memory_alone(self):
        text = with_fields(generator.header_text(), "forward", "  /** Written: [heads_q] float32: most. */\n  flash3_tensor most;\n")
        headers = generator.Headers(text)
        self.assertTrue(generator.schema(headers, "forward_out").endswith("!)? most=None) -> ()"))
        self.assertEqual(generator.schema(headers, "forward"), generator.schema(self.before, "forward"))
        made = generator.python_fields(headers)
        self.assertEqual(made.count('"most": None'), 2)  # of attention and of attention_with_kv_cache

    def test_dimensions_that_may_be_one(self):
        field = """  /** [1 or batch, 1 or heads_q, 1 or seq_q, seq_k] float16, bfloat16 or float32: of pairs. Any strides. All zero: none. */
  flash3_tensor pairs;
"""
        gradient = """  flash3_tensor pairs; /**< as there */
  /** Written: [1 or batch, 1 or heads_q, 1 or seq_q, seq_k] float32 or the dtype of pairs: its gradient. The shape of pairs, which must be given. */
  flash3_tensor dpairs;
"""
        text = generator.header_text()
        headers = generator.Headers(with_fields(with_fields(text, "forward", field), "backward", gradient))
        table = generator.field_table(headers)
        words = calls.SHAPES["[1 or batch, 1 or heads_q, 1 or seq_q, seq_k]"]
        self.assertEqual(table.count(f'FLASH3_FIELD(pairs, .shapes = "{words}", .any_strides = true)'), 2)
        self.assertEqual(table.count(f'FLASH3_FIELD(dpairs, .is_written = true, .shapes = "{words}", .like = "pairs")'), 1)
        self.assertIn("  BiasView pairs;\n", generator.added_views(headers))
        self.assertEqual(headers.gradients()["pairs"], "dpairs")
        with self.assertRaisesRegex(SystemExit, "dpairs has the shape of pairs, which is no field of it"):
            generator.Headers(with_fields(text, "backward", gradient.partition("\n")[2]))
        with self.assertRaisesRegex(SystemExit, "dpairs is a tensor whose comment"):  # a dtype of another than its shape is of
            generator.Headers(with_fields(with_fields(text, "forward", field), "backward", gradient.replace("dtype of pairs", "dtype of q")))

    def test_tensors_need_a_description(self):
        def headers_with(comment):
            return generator.Headers(with_fields(generator.header_text(), "forward", f"  /** {comment} */\n  flash3_tensor most;\n"))
        for comment in ("of each head", "[heads_q]: of each", "[tokens] float32: of each", "[heads_q] or [tokens] float32: of each",
                        "[batch, heads_q] or [batch, heads_q, seq_q] float32: two of two dimensions where rows are packed"):
            with self.assertRaisesRegex(SystemExit, "forward_params.most is a tensor whose comment does not begin with its shapes"):
                headers_with(comment)
        with self.assertRaisesRegex(SystemExit, "most does not go with key_mask, which is no field"):
            headers_with("[heads_q] float32: of each. Not with key_mask.")

    def test_what_cannot_be_read(self):
        for field in ("double x;", "int32_t x, y;", "int32_t x[2];"):
            with self.assertRaises(SystemExit):
                generator.Headers(with_fields(generator.header_text(), "forward", f"  {field}\n"))


if __name__ == "__main__":
    unittest.main()
