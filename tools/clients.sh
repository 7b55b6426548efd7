#!/usr/bin/env bash
# Real clients talk to `luce serve`: the agents codex, opencode, Claude Code and pi each answer a prompt, read a file,
# write one and call a tool with a nested argument, and what they sent is judged (tools/clients/recorded.py); the libraries of tools/clients/ (the AI SDK's Responses provider, litellm, langchain, instructor and
# ollama) write one by a tool and go on with what it answers. What the model says is scripted
# (tests/support/scripted_model.py); the clients, the server and the engine are the real ones. It needs Node 20, npm, and luce
# with its test extra.
#
#     tools/clients.sh FOLDER [CLIENT ...]      # FOLDER keeps the packages of npm and pip; all clients without a name
#     tools/clients.sh --dialect gemma FOLDER [CLIENT ...]      # The model writes calls as Gemma 4 does, not Qwen
#     tools/clients.sh --images FOLDER [AGENT ...]      # What agents read by their own tools is a PNG; needs the extra vision
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
dialect=qwen images=
while [[ ${1:-} == --* ]]; do
    case $1 in
    --dialect) dialect=${2:?say which dialect: qwen or gemma} && shift ;;
    --images) images=1 ;;
    *) echo "no such option: $1" >&2 && exit 2 ;;
    esac
    shift
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:?say in which folder the npm packages are kept}
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
shift
agents=(codex opencode claude pi)
declare -A libraries=([litellm]=litellm [langchain]=langchain-openai [instructor]=instructor [ollama]=ollama)
clients=("$@")
(($#)) || clients=("${agents[@]}")
(($#)) || [[ $images ]] || clients+=(aisdk "${!libraries[@]}")
declare -A packages=([codex]=@openai/codex [opencode]=opencode-ai [claude]=@anthropic-ai/claude-code
    [pi]=@mariozechner/pi-coding-agent [aisdk]="ai @ai-sdk/openai zod")
python=${PYTHON:-python3}
work=$(mktemp -d "$folder/run.XXXXXX")
export HOME=$work/home LUCE_KEY=local
mkdir -p "$work/files" "$work/recorded" "$HOME/.codex" "$HOME/.pi/agent"
trap 'kill "$server" "$recorder" 2>/dev/null || true' EXIT

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

"$python" "$root/tools/clients/script.py" "$work" "$dialect" $images >"$work/script.json"
PYTHONPATH=$root/tests/support${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/tests/support/scripted_model.py" "$work/script.json" "$work/model.gguf" "$dialect" ${images:+"$work/mmproj.gguf"}
# Without the working folder, whose luce would be taken before the one that is installed.
"$python" -c 'import sys; sys.path.pop(0); from luce.__main__ import main; main()' serve --gguf "scripted=$work/model.gguf" --port 0 --ctx 100000 --parallel 2 --device cpu --log-json ${images:+--mmproj "$work/mmproj.gguf"} 2>"$work/server.log" &
server=$! recorder=
for _ in $(seq 300); do
    grep -q '^luce serves' "$work/server.log" && break
    kill -0 "$server" || { cat "$work/server.log"; exit 1; }
    sleep 0.2
done
url=$(sed -n 's/^luce serves .* at //p' "$work/server.log")
"$python" "$root/tools/clients/recorder.py" "$url" "$work/recorded" >"$work/recorder.log" &
recorder=$!
until [[ -s $work/recorder.log ]]; do
    kill -0 "$recorder"
    sleep 0.2
done
url=$(<"$work/recorder.log")

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
  {"id": "scripted", "name": "scripted", "reasoning": false, "input": ["text", "image"], "contextWindow": 90000,
   "maxTokens": 4000, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}
END
cat >"$work/opencode.json" <<END
{"provider": {"luce": {"npm": "@ai-sdk/openai-compatible", "name": "luce",
  "options": {"baseURL": "$url/v1", "apiKey": "local"}, "models": {"scripted": {"name": "scripted",
    "attachment": true, "modalities": {"input": ["text", "image"], "output": ["text"]}}}}},
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
        "$program" -p "$prompt" --output-format json --allowedTools Read,Write,TaskCreate ;;
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

judged() { # `judged CLIENT` says what an agent's requests show.
    [[ " ${agents[*]} " != *" $1 "* ]] || "$python" "$root/tools/clients/recorded.py" "$work" "$1" $images
}

failed=0
cd "$work/files"
for client in "${clients[@]}"; do
    said=$work/$client.log
    if ask "$client" </dev/null >"$said" 2>&1 && grep -q "$client is done" "$said" &&
        [[ $(cat "$client.txt") == "copied by $client" ]] && judged "$client" >>"$said" 2>&1; then
        echo "$client: ok, $(version "$client")"
        sed -n '/^    .* by turn: /p' "$said"
    else
        echo "$client: FAILED, see $said"
        failed=1
    fi
done
grep -v '^luce serves' "$work/server.log" || true
exit "$failed"
