#!/usr/bin/env bash
# Real clients talk to `luce serve`: the agents codex, opencode, Claude Code and pi each answer a prompt, read a file
# and write one; the libraries of tools/clients/ (the AI SDK's Responses provider, litellm, langchain, instructor and
# ollama) write one by a tool and go on with what it answers. What the model says is scripted
# (tests/support/scripted_model.py); the clients, the server and the engine are the real ones. It needs Node 20, npm, and luce
# with its test extra.
#
#     tools/clients.sh FOLDER [CLIENT ...]      # FOLDER keeps the packages of npm and pip; all clients without a name
#     tools/clients.sh --dialect gemma FOLDER [CLIENT ...]      # The model writes calls as Gemma 4 does, not Qwen
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
dialect=qwen
if [[ ${1:-} == --dialect ]]; then
    dialect=${2:?say which dialect: qwen or gemma}
    shift 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:?say in which folder the npm packages are kept}
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
shift
agents=(codex opencode claude pi)
declare -A libraries=([litellm]=litellm [langchain]=langchain-openai [instructor]=instructor [ollama]=ollama)
clients=("$@")
(($#)) || clients=("${agents[@]}" aisdk "${!libraries[@]}")
declare -A packages=([codex]=@openai/codex [opencode]=opencode-ai [claude]=@anthropic-ai/claude-code
    [pi]=@mariozechner/pi-coding-agent [aisdk]="ai @ai-sdk/openai zod")
python=${PYTHON:-python3}
work=$(mktemp -d "$folder/run.XXXXXX")
export HOME=$work/home LUCE_KEY=local
mkdir -p "$work/files" "$HOME/.codex" "$HOME/.pi/agent"
echo "the input" >"$work/files/in.txt"
trap 'kill "$server" 2>/dev/null || true' EXIT

is_there() { # Says whether a client was installed before.
    [[ -x $folder/node_modules/.bin/$1 || ($1 == aisdk && -d $folder/node_modules/@ai-sdk/openai) ]]
}
for client in "${clients[@]}"; do
    if [[ ${libraries[$client]:-} ]]; then
        [[ -x $folder/python/bin/pip ]] || "$python" -m venv "$folder/python"
        "$folder/python/bin/pip" install --quiet "${libraries[$client]}"
    elif ! is_there "$client"; then
        read -ra named <<<"${packages[$client]:?no such client: $client}"
        npm install --no-audit --no-fund --prefix "$folder" "${named[@]}"
    fi
done

"$python" - "$work" "$dialect" >"$work/script.json" <<'END'
import json, sys
files = sys.argv[1] + "/files/"
def call(name, **values):
    if sys.argv[2] == "gemma":
        told = ",".join(f'{key}:<|"|>{value}<|"|>' for key, value in values.items())
        return f"<|tool_call>call:{name}{{{told}}}<tool_call|>"
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"
def turns(name, read, write):
    return ["I read the file.\n\n" + read, write, f"{name} is done."]
def written(name):
    return call("write", path=f"{files}{name}.txt", content=f"copied by {name}")
said = {name: ["I write it.\n\n" + written(name), f"{name} is done."] for name in
        ("aisdk", "litellm", "langchain", "ollama")}
print(json.dumps(said | {
    "codex": turns("codex", call("exec_command", cmd=f"cat {files}in.txt"),
                   call("exec_command", cmd=f"echo copied by codex > {files}codex.txt")),
    "opencode": turns("opencode", call("read", filePath=files + "in.txt"),
                      call("write", content="copied by opencode", filePath=files + "opencode.txt")),
    "claude": turns("claude", call("Read", file_path=files + "in.txt"),
                    call("Write", file_path=files + "claude.txt", content="copied by claude")),
    "pi": turns("pi", call("read", path=files + "in.txt"),
                call("write", path=files + "pi.txt", content="copied by pi")),
}))
END
PYTHONPATH=$root/tests/support${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/tests/support/scripted_model.py" "$work/script.json" "$work/model.gguf" "$dialect"
# Without the working folder, whose luce would be taken before the one that is installed.
"$python" -c 'import sys; sys.path.pop(0); from luce.__main__ import main; main()' serve --gguf "scripted=$work/model.gguf" --port 0 --ctx 100000 --parallel 2 --device cpu 2>"$work/server.log" &
server=$!
for _ in $(seq 300); do
    grep -q '^luce serves' "$work/server.log" && break
    kill -0 "$server" || { cat "$work/server.log"; exit 1; }
    sleep 0.2
done
url=$(sed -n 's/^luce serves .* at //p' "$work/server.log")

cat >"$HOME/.codex/config.toml" <<END
model = "scripted"
model_provider = "luce"
[model_providers.luce]
name = "luce"
base_url = "$url/v1"
wire_api = "responses"
env_key = "LUCE_KEY"
END
cat >"$HOME/.pi/agent/models.json" <<END
{"providers": {"luce": {"baseUrl": "$url/v1", "api": "openai-completions", "apiKey": "local", "models": [
  {"id": "scripted", "name": "scripted", "reasoning": false, "input": ["text"], "contextWindow": 90000,
   "maxTokens": 4000, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}
END
cat >"$work/opencode.json" <<END
{"provider": {"luce": {"npm": "@ai-sdk/openai-compatible", "name": "luce",
  "options": {"baseURL": "$url/v1", "apiKey": "local"}, "models": {"scripted": {"name": "scripted"}}}},
 "permission": {"edit": "allow", "bash": "allow"}}
END

ask() { # `ask CLIENT` gives one prompt, as each takes it.
    local program=$folder/node_modules/.bin/$1 prompt="Please SAY $1"
    case $1 in
    aisdk) node "$root/tools/clients/ai_sdk.mjs" "$url" "$folder" ;;
    litellm | langchain | instructor | ollama) "$folder/python/bin/python" "$root/tools/clients/libraries.py" "$1" "$url" ;;
    codex) "$program" exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json "$prompt" ;;
    opencode) OPENCODE_CONFIG=$work/opencode.json "$program" run -m luce/scripted --format json "$prompt" ;;
    claude) ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=local ANTHROPIC_MODEL=scripted \
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=90000 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 \
        "$program" -p "$prompt" --output-format json --allowedTools Read,Write ;;
    pi) "$program" -p --no-session --provider luce --model scripted "$prompt" ;;
    esac
}

version() { # `version CLIENT` says which one it is.
    case $1 in
    aisdk) node -p "require('$folder/node_modules/@ai-sdk/openai/package.json').version" ;;
    litellm | langchain | instructor | ollama)
        "$folder/python/bin/pip" show "${libraries[$1]}" | sed -n 's/^Version: //p' ;;
    *) "$folder/node_modules/.bin/$1" --version 2>&1 | tail -1 ;;
    esac
}

failed=0
cd "$work/files"
for client in "${clients[@]}"; do
    said=$work/$client.log
    if ask "$client" </dev/null >"$said" 2>&1 && grep -q "$client is done" "$said" &&
        [[ $(cat "$client.txt") == "copied by $client" ]]; then
        echo "$client: ok, $(version "$client")"
    else
        echo "$client: FAILED, see $said"
        failed=1
    fi
done
grep -v '^luce serves' "$work/server.log" || true
exit "$failed"
