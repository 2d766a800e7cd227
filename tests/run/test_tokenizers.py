"""Tokenizers that are trained for a run."""

from chats import CHATS, assistant, user

from lowmem.run.tokenizers import train_tokenizer


def test_a_trained_tokenizer_gives_any_text_back(tokenizer):
    for text in ("plain", "tab\tand\nline  two spaces", "Größe → 日本 🙂", " lead , trail . "):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_same_texts_give_the_same_tokenizer(tmp_path):
    texts = [f"the {word} of {word[::-1]}" for word in ("alpha", "beta", "gamma", "delta")] * 3
    first, second = (train_tokenizer(iter(texts), 300) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    first.save_pretrained(tmp_path)
    loaded = type(first).from_pretrained(tmp_path)
    chat = CHATS[0]["messages"]
    assert loaded.apply_chat_template(chat) == first.apply_chat_template(chat)
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|end|>", "<|pad|>", "<|begin|>")


def test_its_prompt_is_a_prefix_of_prompt_and_answer(tokenizer):
    for answer in ("it is", " it is", "\nit", "", "<|user|>"):
        chat = [user("what is "), assistant(answer)]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
        assert tokenizer.apply_chat_template(chat)["input_ids"][: len(prompt)] == prompt
